"""Rewards between the functions that give them and the advantages TRL makes of them. Pure: `kl`, `usable`; the rest knows the trainer."""
