"""Where slices live and products are computed. `base.Device` is what residency and ops see."""
