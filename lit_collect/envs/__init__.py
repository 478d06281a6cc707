"""Environments: the batched protocol inside, and the ways in from Gymnasium."""
