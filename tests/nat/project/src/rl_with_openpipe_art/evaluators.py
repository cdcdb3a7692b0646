"""The evaluators `percent_games_won` and `step_value_computation`."""
# pyright: reportMissingImports=false, reportGeneralTypeIssues=false, reportCallIssue=false

from nat.builder.builder import EvalBuilder
from nat.builder.evaluator import EvaluatorInfo
from nat.cli.register_workflow import register_evaluator
from nat.data_models.evaluator import EvalInput, EvalInputItem, EvaluatorBaseConfig
from nat.data_models.intermediate_step import IntermediateStepType
from nat.plugins.eval.data_models.evaluator_io import EvalOutput, EvalOutputItem
from nat.plugins.eval.evaluator.base_evaluator import BaseEvaluator


class GamesWonConfig(EvaluatorBaseConfig, name="percent_games_won"):
    """1 for a game won, 0.5 for a draw."""


@register_evaluator(config_type=GamesWonConfig)
async def games_won(config: GamesWonConfig, builder: EvalBuilder):
    async def evaluate(items: EvalInput) -> EvalOutput:
        scores = [
            EvalOutputItem(
                id=item.id,
                score={"Win!": 1.0, "Draw!": 0.5}.get(item.output_obj, 0.0),
                reasoning=f"{item.output_obj} for {item.expected_output_obj}",
            )
            for item in items.eval_input_items
        ]
        return EvalOutput(average_score=None, eval_output_items=scores)

    yield EvaluatorInfo(config=config, evaluate_fn=evaluate, description="Games won")


class StepValueConfig(EvaluatorBaseConfig, name="step_value_computation"):
    """The mean value of the moves."""


class StepValues(BaseEvaluator):
    """Reads the values from the steps `agent_move` of the trajectory."""

    async def evaluate_item(self, item: EvalInputItem) -> EvalOutputItem:
        custom = [s for s in item.trajectory if s.event_type == IntermediateStepType.CUSTOM_END]
        values = [s.payload.metadata["value"] for s in custom if s.payload.name == "agent_move"]
        kinds = sorted({str(s.event_type) for s in item.trajectory})
        functions = sorted({s.function_ancestry.function_name for s in item.trajectory})
        score = sum(values) / len(values)  # no move is an error, never a zero
        reasoning = {"values": values, "kinds": kinds, "functions": functions}
        return EvalOutputItem(id=item.id, score=score, reasoning=reasoning)


@register_evaluator(config_type=StepValueConfig)
async def step_value(config: StepValueConfig, builder: EvalBuilder):
    evaluator = StepValues(builder.get_max_concurrency())
    yield EvaluatorInfo(config=config, evaluate_fn=evaluator.evaluate, description="Step values")


class FewWordsConfig(EvaluatorBaseConfig, name="few_words"):
    """Fewer words are better; the number is that of the tool."""


class FewWords(BaseEvaluator):
    """Reads the output of the tool from the trajectory."""

    async def evaluate_item(self, item: EvalInputItem) -> EvalOutputItem:
        [tool] = [s for s in item.trajectory if s.event_type == IntermediateStepType.TOOL_END]
        words = int(str(item.output_obj).split()[0])
        steps = [(str(s.event_type), s.function_ancestry.function_name) for s in item.trajectory]
        reasoning = {"tool": tool.payload.name, "words": words, "steps": steps}
        return EvalOutputItem(id=item.id, score=1 / (1 + words), reasoning=reasoning)


@register_evaluator(config_type=FewWordsConfig)
async def few_words(config: FewWordsConfig, builder: EvalBuilder):
    evaluator = FewWords(builder.get_max_concurrency())
    yield EvaluatorInfo(config=config, evaluate_fn=evaluator.evaluate, description="Few words")
