"""Networks shared by the built-in policies of both packages.

Import the parts from their files: ``mlp``, ``vision``, ``encoders``, ``heads``, ``actor_critic``.
"""
