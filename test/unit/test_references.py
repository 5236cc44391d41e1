"""The references agree with each other, and the tiny models are fit for exact comparison of tokens and counts."""

from __future__ import annotations

import statistics

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

from sglang_dflash_rocm.testing.draft_reference import DraftReference  # noqa: E402
from sglang_dflash_rocm.testing.reference import TinyReference, softmax_attention  # noqa: E402
from sglang_dflash_rocm.testing.tiny_models import build_tiny_models, tiny_prompts  # noqa: E402

PROMPTS = tiny_prompts(8)
ANSWER = 64
REAL = ["base", "wide"]


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    out = tmp_path_factory.mktemp("tiny")
    return {variant: build_tiny_models(out, variant) for variant in ("base", "fused", "wide")}


@pytest.fixture(scope="session")
def targets(models):
    return {variant: TinyReference.from_checkpoint(pair.target) for variant, pair in models.items()}


@pytest.fixture(scope="session")
def runs(models):
    """Greedy answers with accepted counts, per variant and prompt."""
    drafts = {
        variant: DraftReference.from_checkpoint(models[variant].target, models[variant].draft) for variant in REAL
    }
    return {variant: [draft.run(prompt, ANSWER) for prompt in PROMPTS] for variant, draft in drafts.items()}


@pytest.mark.parametrize("variant", REAL)
def test_gaps_are_comfortable(targets, runs, variant):
    target = targets[variant]
    gaps = [target.min_gap(prompt, run.tokens) for prompt, run in zip(PROMPTS, runs[variant], strict=True)]
    assert min(gaps) > 1e-3
    assert min(run.min_gap for run in runs[variant]) > 1e-3


@pytest.mark.parametrize("variant", REAL)
def test_float64_gives_the_same_tokens_and_counts(models, runs, variant):
    pair = models[variant]
    exact = DraftReference.from_checkpoint(pair.target, pair.draft, dtype=torch.float64)
    for prompt, run in zip(PROMPTS[:3], runs[variant], strict=False):
        again = exact.run(prompt, ANSWER)
        assert (again.tokens, again.accepted) == (run.tokens, run.accepted)


@pytest.mark.parametrize("variant", ["base", "fused", "wide"])
def test_transformers_gives_the_same_tokens(models, targets, runs, variant):
    pytest.importorskip("transformers.models.mimo_v2_flash")
    from sglang_dflash_rocm.testing.hf_reference import HFReference

    hf = HFReference.from_checkpoint(models[variant].target)
    for prompt, run in zip(PROMPTS[:4], runs["wide" if variant == "wide" else "base"], strict=False):
        assert hf.greedy(prompt, 24) == run.tokens[:24]
    ids = [*PROMPTS[0], *run.tokens]
    torch.testing.assert_close(hf.logits(ids), targets[variant].logits(ids), atol=1e-4, rtol=1e-4)


def test_transformers_reference_names_a_lost_weight(models):
    pytest.importorskip("transformers.models.mimo_v2_flash")
    from sglang_dflash_rocm.testing.hf_reference import HFReference, WeightMismatch
    from sglang_dflash_rocm.testing.reference import load_checkpoint

    config, weights = load_checkpoint(models["base"].target, torch.float32)
    weights["model.layers.1.self_attn.sink"] = weights.pop("model.layers.1.self_attn.attention_sink_bias")
    with pytest.raises(WeightMismatch, match=r"missing \['model.layers.1.self_attn.sinks'\], unexpected .*attn.sink'"):
        HFReference(config, weights)


def test_fused_equals_base(targets):
    for prompt in PROMPTS[:3]:
        torch.testing.assert_close(targets["fused"].logits(prompt), targets["base"].logits(prompt), atol=0, rtol=0)


@pytest.mark.parametrize("variant", REAL)
def test_one_key_more_gives_other_tokens(models, runs, variant):
    pair = models[variant]
    wider = TinyReference.from_checkpoint(pair.target, window_keys=pair.config.sliding_window + 1)
    answers = [wider.greedy(prompt, 40) for prompt in PROMPTS[:4]]
    assert any(answer != run.tokens[:40] for answer, run in zip(answers, runs[variant], strict=False))


def test_window_counts_the_querys_own_key(targets):
    """A key ``window`` positions back is invisible to every SWA layer, one position nearer it is not."""
    target = targets["base"]
    h = torch.randn(20, 64, generator=torch.Generator().manual_seed(0))
    window = target.config["sliding_window"]
    for back, seen in ((window - 1, True), (window, False)):
        changed = h.clone()
        changed[19 - back] += 1.0
        same = torch.equal(target._attention(1, h)[19], target._attention(1, changed)[19])
        assert same != seen


def test_a_sink_takes_weight_and_gives_nothing():
    q = k = torch.zeros(1, 2, 4)
    v = torch.ones(1, 1, 3)
    visible = torch.ones(1, 1, dtype=torch.bool)
    out = softmax_attention(q, k[:, :1], v, visible, torch.tensor([0.0, -1e9]))
    torch.testing.assert_close(out[0], torch.tensor([[0.5] * 3, [1.0] * 3]))


@pytest.mark.parametrize("variant", REAL)
def test_acceptance_is_real_and_varied(runs, variant):
    lengths = [run.accept_length for run in runs[variant]]
    assert 2.5 < statistics.mean(lengths) < 4.5
    assert max(lengths) - min(lengths) > 1
    seen = {count for run in runs[variant] for count in run.accepted}
    assert seen == set(range(8))
    assert all(len(set(run.tokens)) > ANSWER / 2 for run in runs[variant]), "answers fell into a cycle"


def test_a_verify_loop_step_by_step_gives_the_same_run(models, runs):
    """Draft, verify the block with the target, commit, repeat: the loop that DraftReference.run shortens."""
    draft = DraftReference.from_checkpoint(models["base"].target, models["base"].draft)
    target, layers = draft.target, draft.config["dflash_config"]["target_layer_ids"]
    for prompt, run in zip(PROMPTS[:2], runs["base"], strict=False):
        committed, tokens, accepted = list(prompt), [int(target.logits(prompt)[-1].argmax())], []
        while len(tokens) < ANSWER:
            states = target.forward(committed).hidden_states
            features = torch.cat([states[layer] for layer in layers], -1) @ draft.weights["fc.weight"].T
            context = torch.nn.functional.rms_norm(features, (64,), draft.weights["hidden_norm.weight"], 1e-6)
            block = [tokens[-1], *draft.draft_logits(tokens[-1], context).argmax(-1).tolist()]
            predicted = target.logits([*committed, *block])[len(committed) :].argmax(-1).tolist()
            count = 0
            while count < 7 and block[count + 1] == predicted[count]:
                count += 1
            committed += block[: count + 1]
            tokens += predicted[: count + 1]
            accepted.append(count)
        assert (tokens[:ANSWER], accepted) == (run.tokens, run.accepted)


def test_counts_notice_draft_faults(models, runs):
    """What the end-to-end tests rely on: counts move when the draft sees the wrong context, token, or sinks."""
    pair = models["base"]

    def counts(break_it):
        draft = DraftReference.from_checkpoint(pair.target, pair.draft)
        break_it(draft)
        return [draft.accept_counts(prompt, 32) for prompt in PROMPTS[:6]]

    def no_context(draft):
        draft.weights["fc.weight"].zero_()

    def wrong_bonus(draft):
        right = draft.draft_logits
        draft.draft_logits = lambda bonus, context: right(bonus + 1, context)

    def no_sinks(draft):
        draft.config["dflash_config"]["attention_sink_bias"] = False

    whole = counts(lambda draft: None)
    assert statistics.mean(sum(c) / len(c) for c in counts(no_context)) < 0.2
    assert counts(wrong_bonus) != whole
    assert counts(no_sinks) != whole


def test_draft_window_starts_on_a_page(models):
    def draft(**kw):
        return DraftReference.from_checkpoint(models["base"].target, models["base"].draft, **kw)

    assert draft()._context_start(100) == 0
    assert draft(draft_window=16)._context_start(100) == 84
    assert draft(draft_window=16)._context_start(10) == 0
    assert draft(draft_window=16, page_size=16)._context_start(100) == 80
    assert draft(draft_window=500).accept_counts(PROMPTS[0], 24) == draft().accept_counts(PROMPTS[0], 24)


def test_layers_are_causal_as_the_config_says(models):
    draft = DraftReference.from_checkpoint(models["base"].target, models["base"].draft)
    rows, keys = torch.arange(20, 28), torch.arange(28)
    sliding, full = (draft._visible(layer, rows, keys) for layer in (0, 1))
    assert full.all()
    assert sliding[0].nonzero().flatten().tolist() == list(range(5, 21))
    draft.config["is_causal"] = False
    assert draft._visible(0, rows, keys)[0].nonzero().flatten().tolist() == list(range(5, 28))
    draft.config["is_causal"] = True
    assert draft._visible(1, rows, keys)[0].nonzero().flatten().tolist() == list(range(21))


def test_short_answers_count_whole_steps(models):
    draft = DraftReference.from_checkpoint(models["base"].target, models["base"].draft)
    assert draft.run(PROMPTS[0], 1).accepted == []
    run = draft.run(PROMPTS[0], 9)
    assert len(run.tokens) == 9 and sum(run.accepted) + run.verify_steps >= 8
    with pytest.raises(ValueError, match="a prompt of 0 tokens"):
        draft.run([], 4)
