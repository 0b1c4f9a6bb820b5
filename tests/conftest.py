from hypothesis import settings

# CI machines are shared and slow: examples are few and repeatable, and none fails for its time.
settings.register_profile("ork", deadline=None, derandomize=True, max_examples=50)
settings.load_profile("ork")
