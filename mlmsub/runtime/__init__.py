"""What runs inside the container: the stages, on megatron.core and modelopt."""
