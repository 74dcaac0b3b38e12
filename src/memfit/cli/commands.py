"""The commands, one record each: what it is for, examples, which options it takes and who carries it out."""

from __future__ import annotations

from typing import NamedTuple


class Command(NamedTuple):
    """One command. `options` names the classes whose fields are its options; `handler` is `module:function`."""

    name: str
    help: str
    examples: tuple[tuple[str, str], ...]
    """(command line, what it does)"""
    handler: str
    options: tuple[str, ...] = ()
    """Names of classes in `memfit.job`; every command also has the options of `Presentation`."""
    argument: str = ""
    """The name of the one positional argument in the help text; empty if there is none."""
    aliases: tuple[str, ...] = ()


_ABOUT_A_MODEL = ("Hardware", "Overheads", "Dimensions")
_ABOUT_A_JOB = ("Parallelism", *_ABOUT_A_MODEL)
_MODEL_FORMS = "a preset, a Hub id, a path to a config.json or its folder, - for standard input, or a size such as 7B"

COMMANDS: tuple[Command, ...] = (
    Command(
        name="fit",
        help="Which ways of using a model fit on which hardware (the overview)",
        examples=(
            ("memfit llama-3.1-8b", "the overview over common devices"),
            ("memfit llama-3.1-8b --on 4090", "the overview for one device"),
            ("memfit fit ./config.json --on 24GiB --json", "the same from a file, as JSON"),
        ),
        handler="memfit.cli.ask:overview",
        options=_ABOUT_A_MODEL,
        argument="MODEL",
    ),
    Command(
        name="infer",
        help="Memory of serving or generating with a model",
        examples=(
            ("memfit infer llama-3.1-8b --on 4090 --context 8192", "does it fit, and up to which context"),
            ("memfit infer ./config.json --on h100 --concurrency 32 --kv-dtype fp8", "many sequences, 8-bit cache"),
            ("memfit serve 70B --quantization int4 --on 2x4090 --json", "a model by its size, as JSON"),
        ),
        handler="memfit.cli.ask:answer",
        options=("Inference", *_ABOUT_A_JOB),
        argument="MODEL",
        aliases=("serve",),
    ),
    Command(
        name="train",
        help="Memory of training every parameter of a model",
        examples=(
            ("memfit train llama-3.1-8b --on h100 --batch 1 --seq 4096", "does it fit, and what would make it fit"),
            ("memfit train 7B --optimizer adamw-8bit --checkpointing full", "a model by its size, no device"),
            ("memfit train --layers 32 --hidden 4096 --heads 32 --on 80GB", "a model by its dimensions"),
        ),
        handler="memfit.cli.ask:answer",
        options=("Training", *_ABOUT_A_JOB),
        argument="MODEL",
    ),
    Command(
        name="finetune",
        help="Memory of fine-tuning a model: full, LoRA or QLoRA",
        examples=(
            ("memfit finetune llama-3.1-8b --on 4090 --method qlora --seq 2048", "QLoRA on a 24 GB card"),
            ("memfit finetune ./config.json --lora-rank 64 --lora-targets q_proj,v_proj", "LoRA on two modules"),
            ("memfit finetune 8B --method full --optimizer paged-adamw-8bit --on h100", "every parameter"),
        ),
        handler="memfit.cli.ask:answer",
        options=("FineTuning", *_ABOUT_A_JOB),
        argument="MODEL",
        aliases=("fine-tune",),
    ),
    Command(
        name="devices",
        help="The devices memfit knows, with marketed and usable memory",
        examples=(
            ("memfit devices", "all of them"),
            ("memfit devices 4090", "how a short name is read, and where its figures come from"),
            ("memfit devices --format csv", "for a spreadsheet"),
        ),
        handler="memfit.cli.listings:devices",
        argument="NAME",
    ),
    Command(
        name="runtimes",
        help="The software whose habits memfit knows, and the kernels that each runs",
        examples=(
            ("memfit runtimes", "all of them"),
            ("memfit runtimes megatron", "one of them: what it keeps where, what it refuses, where that was read"),
        ),
        handler="memfit.cli.listings:runtimes",
        argument="NAME",
    ),
    Command(
        name="models",
        help="The preset models and the architecture families memfit knows",
        examples=(
            ("memfit models", "all presets"),
            ("memfit models llama-3.1-8b", "one model: parameters, dimensions, where it was read from"),
        ),
        handler="memfit.cli.listings:models",
        argument="NAME",
    ),
    Command(
        name="validate",
        help="Compare memfit with measured and traced runs and print the error",
        examples=(("memfit validate", "every row of the corpus that memfit can express"),),
        handler="memfit.cli.accuracy:validate",
    ),
    Command(
        name="schema",
        help="JSON Schema of the input (train, finetune, infer) or of the answer",
        examples=(
            ("memfit schema train", "the inputs of a training job"),
            ("memfit schema answer", "what --json prints"),
        ),
        handler="memfit.cli.listings:schema",
        argument="KIND",
    ),
)

EXAMPLES = """\
memfit llama-3.1-8b --on 4090                        which ways of using a model fit on a device
memfit infer llama-3.1-8b --on 4090 --context 8192   serving: does it fit, up to which context
memfit train 7B --on h100 --seq 4096                 training a model by its size
memfit finetune ./config.json --method qlora --json  fine-tuning from a config.json, as JSON
memfit devices                                       the devices memfit knows (also: memfit models, memfit runtimes)
memfit train -h                                      the options of a command (memfit -h lists the commands)
"""
"""What `memfit` alone prints: six lines."""

MODEL_HELP = f"MODEL is {_MODEL_FORMS}"


def command_names() -> dict[str, Command]:
    """Every name that starts a command, aliases included."""
    return {name: command for command in COMMANDS for name in (command.name, *command.aliases)}


def classes_of(command: Command) -> tuple[type, ...]:
    """The classes whose fields are the options of this command, those of the presentation last."""
    import memfit.job
    from memfit.cli.presentation import Presentation

    return (*(getattr(memfit.job, name) for name in command.options), Presentation)
