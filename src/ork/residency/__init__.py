"""Which slices are where, and when."""
