"""Tiny models, references and a server harness for the demo and the tests. Nothing here runs in a user's server."""
