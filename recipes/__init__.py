"""Complete training scripts, each runnable by `distkeras run -m`."""
