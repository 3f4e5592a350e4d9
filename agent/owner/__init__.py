"""The owner's rules: may this device work now, why or why not, and until when."""
