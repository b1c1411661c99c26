"""GRPO on any task of reasoning-gym, with any causal language model.

    accelerate launch --config_file recipes/accelerate/zero3.yaml recipes/grpo_reasoning_gym.py \
        --config recipes/reasoning_gym/full_zero3.yaml --model_name_or_path Qwen/Qwen2.5-0.5B-Instruct

The task is named in the YAML, with its own arguments: `task: chain_sum`, `task_kwargs: {min_terms: 2, max_terms: 3}`. Prompts
are chats where the tokenizer has a chat template and plain text where it has none; the reward is the task's own score of what
stands in <answer> tags, and a tenth of that where the tags are missing.

Hardware: one GPU with 24 GB for 0.5B parameters in full, less with LoRA; the YAMLs ran on two CPU cores with a random model of
80k parameters, as a check of the path. Expected there: it runs. Not tried: models above 135M parameters, several GPUs.
Needs the extra `reasoning-gym` (`pip install 'grpo-ext[reasoning-gym]'`).
"""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpo_ext.quiet import quiet

quiet()

from datasets import Dataset
from transformers import AutoTokenizer
from transformers.trainer_callback import PrinterCallback
from trl import TrlParser

from grpo_ext import GRPOExtConfig, GRPOExtTrainer
from grpo_ext.console import StepLines

INSTRUCTION = "Think as long as you need, then give the final answer between <answer> and </answer>."
ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


@dataclass
class TaskArguments:
    model_name_or_path: str = field(metadata={"help": "Hub id or directory of a causal language model."})
    task: str = field(default="chain_sum", metadata={"help": "Name of a reasoning-gym task."})
    task_kwargs: dict[str, Any] | None = field(default=None, metadata={"help": "Arguments of the task."})
    task_size: int = field(default=2000, metadata={"help": "Number of problems."})
    lora_r: int = field(default=0, metadata={"help": "Rank of a LoRA adapter on all linear layers; 0 trains everything."})
    lora_alpha: int = field(default=32, metadata={"help": "LoRA alpha."})
    resume: bool = field(default=False, metadata={"help": "Go on from output_dir's newest complete checkpoint, if it has any."})


def problems(task: TaskArguments, tokenizer: Any, seed: int) -> tuple[Dataset, Any]:
    """(prompts with the index of their problem, the reasoning-gym task that scores them)."""
    import reasoning_gym

    gym = reasoning_gym.create_dataset(task.task, size=task.task_size, seed=seed, **(task.task_kwargs or {}))

    def prompt(question: str) -> Any:
        text = f"{question}\n{INSTRUCTION}"
        return [{"role": "user", "content": text}] if tokenizer.chat_template else f"{text}\n"

    return Dataset.from_list([{"prompt": prompt(gym[i]["question"]), "index": i} for i in range(len(gym))]), gym


def score_with(gym: Any) -> Any:
    def score(completions: list, index: list[int], **kwargs: Any) -> list[float]:
        rewards = []
        for completion, i in zip(completions, index, strict=True):
            text = completion if isinstance(completion, str) else completion[-1]["content"]
            tagged = ANSWER.search(text)
            value = gym.score_answer(answer=(tagged[1] if tagged else text).strip(), entry=gym[i])
            rewards.append(float(value) if tagged else 0.1 * float(value))
        return rewards

    return score


def main() -> None:
    task, config = TrlParser((TaskArguments, GRPOExtConfig)).parse_args_and_config()
    tokenizer = AutoTokenizer.from_pretrained(task.model_name_or_path)
    dataset, gym = problems(task, tokenizer, config.seed)
    peft_config = None
    if task.lora_r:
        from peft import LoraConfig

        peft_config = LoraConfig(r=task.lora_r, lora_alpha=task.lora_alpha, target_modules="all-linear", task_type="CAUSAL_LM")
    trainer = GRPOExtTrainer(
        task.model_name_or_path, score_with(gym), config, dataset, processing_class=tokenizer, peft_config=peft_config
    )
    if config.disable_tqdm:
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(StepLines())
    trainer.train(resume_from_checkpoint=task.resume and any(Path(config.output_dir).glob("checkpoint-*/trainer_state.json")))
    trainer.save_model(config.output_dir)
    if trainer.accelerator.is_main_process:
        print(f"Saved {config.output_dir}", flush=True)


if __name__ == "__main__":
    main()
