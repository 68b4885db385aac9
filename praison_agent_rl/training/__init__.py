"""Training a policy; the only package that imports ``trl``, and only inside the modules that train."""
