"""The training loop, and the parts of a training program around it."""

from torchembed.checkpoints.exports.whole_model import (
    export_safetensors,
    import_tables,
    whole_tables,
)
from torchembed.checkpoints.files.tensor_file import open_safetensors
from torchembed.checkpoints.folder import CheckpointFolder
from torchembed.checkpoints.run.training_run import TrainingRun
from torchembed.core.ranks.process_exit import exit_process_with_parent
from torchembed.core.ranks.program_agreement import check_ranks_agree, source_files
from torchembed.data.tasks import Task, TaskKind
from torchembed.step.batches.padded_parts import Padding
from torchembed.step.model_loss import BatchLoss
from torchembed.step.multi_task_loss import MultiTaskLoss
from torchembed.step.pipeline import TrainPipeline
from torchembed.step.stages import Reason, StepForm, StepKind
from torchembed.step.step_result import StepResult
from torchembed.training.affinity import stay_near
from torchembed.training.batches import in_step
from torchembed.training.buffers import average_buffers
from torchembed.training.disk_read_ahead import DiskReadAhead
from torchembed.training.early_stop import EarlyStop
from torchembed.training.epochs import Epochs
from torchembed.training.evaluate import evaluate
from torchembed.training.history import HeldOutPoint, History, LossPoint
from torchembed.training.metrics import MetricsWriter, read_metrics
from torchembed.training.plot import plot_history
from torchembed.training.progress import Progress
from torchembed.training.publishing import ModelPublisher, Published
from torchembed.training.quality import Evaluation, RegressionEvaluation, TaskEvaluations
from torchembed.training.ranking import RankingEvaluation, ranking_quality, target_ranks
from torchembed.training.schedule import LearningRate
from torchembed.training.stop import StopSignal
from torchembed.training.train import train

__all__ = [
    "BatchLoss",
    "CheckpointFolder",
    "DiskReadAhead",
    "EarlyStop",
    "Epochs",
    "Evaluation",
    "HeldOutPoint",
    "History",
    "LearningRate",
    "LossPoint",
    "MetricsWriter",
    "ModelPublisher",
    "MultiTaskLoss",
    "Padding",
    "Progress",
    "Published",
    "RankingEvaluation",
    "Reason",
    "RegressionEvaluation",
    "StepForm",
    "StepKind",
    "StepResult",
    "StopSignal",
    "Task",
    "TaskEvaluations",
    "TaskKind",
    "TrainPipeline",
    "TrainingRun",
    "average_buffers",
    "check_ranks_agree",
    "evaluate",
    "exit_process_with_parent",
    "export_safetensors",
    "import_tables",
    "in_step",
    "open_safetensors",
    "plot_history",
    "ranking_quality",
    "read_metrics",
    "source_files",
    "stay_near",
    "target_ranks",
    "train",
    "whole_tables",
]
