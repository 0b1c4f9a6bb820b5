"""Numbers about a model that runs: speed here, quality and traces later."""
