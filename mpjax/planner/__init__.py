"""What a policy costs on a device, before the launch: memory, matrix units, collectives, a time floor."""
