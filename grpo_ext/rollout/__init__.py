"""Everything that knows the rollout engine: what it runs on, how it gets the actor's weights, what it may sample."""
