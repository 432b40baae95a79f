"""The commands: `mpjax train`, `plan`, `explain`, `numerics`, `export` and `bench`."""
