"""What else is measured of the primary method's students: wrong-trace preference and the three symptoms.

The preference is measured twice: between a teacher and the undistilled student, on the undistilled student's own
completions, which is the teacher's signal before any training and the same text for every teacher; and between
the teacher and the finished student, on the finished student's completions.
"""

from __future__ import annotations

import json
from pathlib import Path

from stillroom.config import DistillConfig
from stillroom.data.asking import select_examples
from stillroom.data.tasks import TASKS, load_task
from stillroom.diagnosis import symptoms, wrong_trace
from stillroom.models import loading
from stillroom.records import write_atomically

EXAMPLES = 100
SAMPLES = 8


def measures(config: DistillConfig, seed: int) -> dict[str, float]:
    """Of a finished cell; read back if they were made before."""
    folder = Path(config.output_dir)
    file = folder / "measures.json"
    if file.is_file():
        return json.loads(file.read_text(encoding="utf-8"))
    name = config.score.tasks[0]
    task = load_task(name, config.data.data_dir)
    examples = select_examples(task, TASKS[name].test_split, EXAMPLES, seed=seed)
    limit = config.sampling.max_completion_length
    teacher = loading.load_teacher(config.teacher.path, config.teacher.dtype)
    students = {"start": config.student.path or "", "finished": str(folder / "student")}
    tokenizer = loading.load_tokenizer(students["finished"])
    found: dict[str, float] = {}
    for when, path in students.items():
        student = loading.load_model(path, config.student.dtype)
        preference, counts = wrong_trace.measure(
            teacher,
            loading.load_tokenizer(config.teacher.path),
            student,
            tokenizer,
            task,
            examples,
            num_samples=SAMPLES,
            max_completion_length=limit,
            writer="student",
            batch_size=256,
            seed=seed,
        )
        found |= {f"wrong_trace/{when}/{form}": e.value for form, e in preference.items()}
        found[f"wrong_trace/{when}/prompts_compared"] = counts["compared"]
    walks = name == "pocket/chains"
    seen = symptoms.measure_symptoms(
        loading.load_model(students["finished"], config.student.dtype),
        tokenizer,
        task,
        examples,
        max_completion_length=limit,
        corrupt=symptoms.corrupt_chain if walks else None,
        intact=symptoms.intact_chain if walks else None,
        batch_size=256,
        seed=seed,
    )
    found |= {f"symptom/{figure}": e.value for figure, e in seen.items()}
    write_atomically(file, json.dumps({k: round(float(v), 6) for k, v in found.items()}, indent=1))
    return found
