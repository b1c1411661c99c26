"""The command line: `grpo-ext plan`, `grpo-ext doctor`, `grpo-ext report`. Each command imports what it needs when it runs."""

import sys
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    name="grpo-ext",
    help="What a GRPO run will do (plan), whether its engine matches its actor (doctor), and how it went (report).",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.command()
def report(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A prob_diff_save_dir, with its prob_diff_step_*.npy.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="The page to write.")] = Path("report.html"),
    png: Annotated[Path | None, typer.Option("--png", help="Also draw the page's figures into this PNG.")] = None,
    warn: Annotated[float, typer.Option(help="Mean probability difference above which a step is marked.")] = 0.005,
    stop: Annotated[float | None, typer.Option(help="A second, higher threshold to draw.")] = None,
) -> None:
    """Draw the dumps of a run: one self-contained HTML page."""
    from grpo_ext.consistency.report import DumpError, write_report

    try:
        pages = write_report(directory, output, png=png, warn=warn, stop=stop)
    except DumpError as error:
        print(f"grpo-ext report: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    print("\n".join(map(str, pages)))


@app.command()
def plan(
    config: Annotated[Path, typer.Option("--config", help="A recipe's YAML file.")],
    num_processes: Annotated[int, typer.Option("--num-processes", help="Ranks that accelerate will launch.")],
    tensor_parallel: Annotated[
        int | None, typer.Option("--tensor-parallel", help="Ranks to an engine; else the recipe's.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    model: Annotated[str | None, typer.Option("--model", help="Model for the memory estimate; else the recipe's.")] = None,
    device: Annotated[
        str | None, typer.Option("--device", help="Device to hold the memory against, such as H100; else detected.")
    ] = None,
    accelerate: Annotated[
        Path | None, typer.Option("--accelerate", help="The file for `accelerate launch`, which says whether it is ZeRO-3.")
    ] = None,
) -> None:
    """The arithmetic of a step, and every divisibility rule that fails, without loading a model."""
    from grpo_ext.plan import run_plan

    code = run_plan(
        config,
        num_processes,
        tensor_parallel=tensor_parallel,
        as_json=json,
        model=model,
        device=device,
        accelerate=accelerate,
    )
    raise typer.Exit(code)


@app.command()
def doctor(
    model: Annotated[str, typer.Option("--model", help="A model directory or hub id.")],
    config: Annotated[
        Path | None, typer.Option("--config", help="A recipe's YAML file, whose engine and sampling settings count.")
    ] = None,
    lora: Annotated[int | None, typer.Option("--lora", help="Also check the push of a LoRA adapter of this rank.")] = None,
) -> None:
    """Start the real engine beside the actor and check that they agree, before and after a push. Exit code 1 if not."""
    from grpo_ext.consistency.doctor import run_doctor

    raise typer.Exit(run_doctor(model, config=config, lora_rank=lora))


def main() -> None:
    app()


if __name__ == "__main__":
    main()
