"""Device code and its host wrappers. Nothing in here imports SGLang."""
