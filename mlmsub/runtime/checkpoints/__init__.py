"""Checkpoints on disk: Hugging Face's and Megatron's, in and out."""
