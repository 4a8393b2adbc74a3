"""The subcommands of ``musa-titan``, one module each."""

import typer

from musa_titan.commands import (
    build_native,
    doctor,
    launch,
    lock,
    options,
    patches,
    ray_env,
    recipe,
    rl_contract,
    verify,
)

app = typer.Typer(
    help="Tools around training with Megatron-LM on Moore Threads GPUs.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("doctor")(doctor.doctor)
app.command("patches")(patches.patches)
app.command("lock")(lock.lock)
app.command("options")(options.options)
app.add_typer(recipe.app, name="recipe")
app.command("launch", context_settings=launch.CONTEXT)(launch.launch)
app.command("ray-env")(ray_env.ray_env)
app.command("rl-contract")(rl_contract.rl_contract)
app.command("verify")(verify.verify)
app.command("build-native")(build_native.build_native)
