"""Computing blocks on a device: worker loop, kernels, operand pieces, memory budget."""
