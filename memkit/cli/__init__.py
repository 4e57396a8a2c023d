"""The `memkit` command.

- `main`: parses arguments without importing torch; every failure is one line
- `commands`: the commands, after parsing
- `plan_command`: `memkit plan`
- `machine`: `memkit bench machine`: measures a machine for plans
- `specs`: makes a model and its inputs from text
- `arguments`: parses the arguments of the command
- `progress`: shows long-running work and warnings on standard error
"""
