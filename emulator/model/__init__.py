"""How an emulated device behaves: compute, link, fidelity, the zoo and fleets drawn from it."""
