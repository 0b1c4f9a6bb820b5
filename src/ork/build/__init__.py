"""Source + quantiser -> pack."""
