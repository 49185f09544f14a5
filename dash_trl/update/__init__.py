"""From rewards to optimizer steps: advantages, filtering, packing, model passes over what is left."""
