"""Train with several processes: on one machine, on several, or on devices that keep their data.

Imports `training` and rooms below it. `flower` needs the extra `federated`.
"""
