"""vLLM servers with base weights and many adapters: started, asked, and drawn from in training."""
