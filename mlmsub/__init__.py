"""Submit containerized Megatron-Core and ModelOpt post-training to Slurm."""

__version__ = "0.1.0"
