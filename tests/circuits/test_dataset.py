"""The labelled data set: equal to dense algebra, saved, and joined with a scan."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import save_file
from transformers import (
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

import headwise as hw
from headwise.circuits.dataset import with_circuits
from headwise.circuits.head_weights import head_weights
from headwise.circuits.labelled import joined
from headwise.errors import FileError, NonFiniteError, OptionError
from headwise.models import build, preset
from headwise.results import io
from headwise.results.circuit_definitions import CIRCUITS
from headwise.results.validate import about, check


@pytest.fixture(scope="module")
def gpt2():
    torch.manual_seed(0)
    config = GPT2Config(n_embd=33, n_head=3, n_layer=3, vocab_size=53, n_positions=128)
    model = GPT2LMHeadModel(config).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) / 7)
    return model


@pytest.fixture(scope="module")
def found(gpt2):
    return hw.circuits(gpt2).dataset


def _dense(model, layer):
    """W_QK and W_OV of every head, folded: ``head d d`` each."""
    block = model.transformer.h[layer]
    d, heads = 33, 3
    centre = torch.eye(d, dtype=torch.float64) - 1 / d
    weight = centre @ torch.diag(block.ln_1.weight) @ block.attn.c_attn.weight
    q, k, v = (x.unflatten(1, (heads, -1)).transpose(0, 1) for x in weight.split(d, 1))
    out = block.attn.c_proj.weight.unflatten(0, (heads, -1))
    return q @ k.mT, v @ out


def test_numbers_are_those_of_dense_matrices(gpt2, found):
    with torch.no_grad():
        for layer in range(3):
            for short, dense in zip(("qk", "ov"), _dense(gpt2, layer), strict=True):
                values = torch.linalg.svdvals(dense)[:, :11].numpy()
                held = found[f"{short}_singular_values_folded"].values[layer]
                np.testing.assert_allclose(held, values, rtol=1e-9)
                norms = torch.linalg.matrix_norm(dense).numpy()
                np.testing.assert_allclose(found[f"{short}_norm_folded"][layer], norms, rtol=1e-9)


def test_copying_is_that_of_the_vocabulary_circuit(gpt2, found):
    with torch.no_grad():
        d = 33
        centre = torch.eye(d, dtype=torch.float64) - 1 / d
        embedding = gpt2.transformer.wte.weight
        logits = centre @ torch.diag(gpt2.transformer.ln_f.weight) @ embedding.T
        _, ov = _dense(gpt2, 1)
        values = torch.linalg.eigvals(embedding @ ov[2] @ logits)
        score = (values.real.sum() / values.abs().sum()).item()
    assert found["copying"].values[1, 2] == pytest.approx(score, abs=1e-6)


def test_composition_stands_at_its_pair(gpt2, found):
    with torch.no_grad():
        (qk, _), (_, ov) = _dense(gpt2, 2), _dense(gpt2, 0)
        norm = torch.linalg.matrix_norm
        for letter, reader in (("q", qk[1]), ("k", qk[1].T)):
            value = norm(ov[2] @ reader) / (norm(ov[2]) * norm(reader))
            held = float(found[f"composition_{letter}"].values[2, 1, 0, 2])
            assert held == pytest.approx(value.item(), rel=1e-5)
    same = found["composition_v"].values
    assert np.isnan(same[0]).all()
    assert np.isnan(same[1, :, 1]).all()
    assert np.isfinite(same[2, :, 0]).all()


def test_every_variable_carries_its_words(found):
    check(found)
    for name, array in found.data_vars.items():
        attributes = array.attrs
        assert attributes["long_name"]
        assert attributes["definition"] == CIRCUITS[name].definition
        assert attributes["units"]
        assert attributes["exactness"]


def test_what_a_layer_does_not_have_is_missing(found):
    assert "rotary_share" not in found  # learned positions
    own = hw.circuits(build(preset("tiny")), behaviours=False).dataset
    assert own["rotary_share"].sum("pair").values == pytest.approx(1.0)
    bert = BertModel(
        BertConfig(hidden_size=24, num_attention_heads=2, num_hidden_layers=2,
                   intermediate_size=16, vocab_size=47)
    ).eval()  # fmt: skip
    assert "copying" not in hw.circuits(bert).dataset


def test_an_encoder_beside_a_decoder_copies_nothing():
    config = T5Config(
        d_model=24, d_kv=6, d_ff=16, num_layers=2, num_heads=4, vocab_size=97,
        decoder_start_token_id=0,
    )  # fmt: skip
    pair = hw.circuits(T5ForConditionalGeneration(config).eval()).dataset
    known = np.isfinite(pair["copying"].values).all(1)
    assert pair["role"].values[known].tolist() == ["decoder"] * 2
    assert np.isfinite(pair["qk_norm"].values).all()  # cross-attention has its W_QK
    assert np.isnan(pair["qk_sign"].values[pair["role"].values == "cross"]).all()


def test_sizes_of_normed_queries_are_left_out_and_ranks_hold():
    config = Qwen3Config(
        hidden_size=24, intermediate_size=16, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=6, vocab_size=31, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    normed = hw.circuits(Qwen3ForCausalLM(config).eval(), behaviours=False).dataset
    assert "qk_norm" not in normed
    assert "qk_spectral_norm_folded" not in normed
    assert normed["qk_form"].values[0].startswith("queries and keys pass norms of their own")
    assert (normed["qk_effective_rank_folded"].values > 1).all()


def test_layers_are_chosen_and_out_of_range_is_an_error(gpt2, found):
    some = hw.circuits(gpt2, layers=[2], behaviours=False).dataset
    np.testing.assert_array_equal(some["qk_norm"][0], found["qk_norm"][2])
    assert some["number"].values.tolist() == [2]
    for layers, message in (([3], "the model has no layer 3"), ([], "no layer is named")):
        with pytest.raises(OptionError, match=message):
            hw.circuits(gpt2, layers=layers)


def test_what_cannot_run_on_repeated_tokens_says_why():
    model = GPT2LMHeadModel(
        GPT2Config(n_embd=10, n_head=1, n_layer=1, vocab_size=7, n_positions=32,
                   bos_token_id=0, eos_token_id=0)
    ).eval()  # fmt: skip
    one = hw.circuits(model).dataset
    assert "behaviours" not in one
    assert about(one)["notes"][0].startswith("no behaviours on repeated tokens: ")
    assert np.isnan(one["composition_q"].values).all()  # one layer


def test_a_broken_weight_is_named(gpt2):
    model = GPT2LMHeadModel(GPT2Config(n_embd=12, n_head=3, n_layer=1, vocab_size=31)).eval()
    with torch.no_grad():
        model.transformer.h[0].attn.c_proj.weight[1, 2] = torch.nan
    with pytest.raises(NonFiniteError, match=r"h\.0"):
        hw.circuits(model)


def test_a_base_gives_the_change(gpt2):
    torch.manual_seed(1)
    tuned = GPT2LMHeadModel(gpt2.config).double().eval()
    tuned.load_state_dict(gpt2.state_dict())
    with torch.no_grad():
        tuned.transformer.h[1].attn.c_proj.weight[11:22] += 0.01 * torch.outer(
            torch.randn(11, dtype=torch.float64), torch.randn(33, dtype=torch.float64)
        )
    change = hw.circuits(tuned, base=gpt2, behaviours=False).dataset
    size = change["ov_change_norm"].values
    assert size[1, 1] > 0
    assert np.count_nonzero(size) == 1
    assert change["ov_change_rank"].values[1, 1] == 1
    assert change["ov_change_energy"].values[1, 1] == pytest.approx(1.0)
    assert (change["qk_change_norm"].values == 0).all()
    with pytest.raises(OptionError, match="a base and an adapter"):
        hw.circuits(tuned, base=gpt2, adapter="somewhere")


def test_an_adapter_gives_its_change(tmp_path):
    config = LlamaConfig(
        hidden_size=24, intermediate_size=16, num_hidden_layers=2, num_attention_heads=4,
        vocab_size=31, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    target = "model.layers.1.self_attn.v_proj"
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": [target]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    tensors = {
        f"base_model.model.{target}.lora_A.weight": torch.randn(2, 24),
        f"base_model.model.{target}.lora_B.weight": torch.randn(24, 2),
    }
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    before = model.get_submodule(target).weight.clone()
    found = hw.circuits(model, adapter=tmp_path, behaviours=False)
    assert torch.equal(model.get_submodule(target).weight, before)
    assert found.dataset["ov_change_rank"].values.tolist() == [[0] * 4, [2] * 4]
    assert about(found.dataset)["adapter"] == str(tmp_path)
    page = hw.report(found, tmp_path / "page.html").read_text(encoding="utf-8")
    assert "change of W_OV" in page
    assert f"against {tmp_path}" in page


def test_saved_sets_are_whole(gpt2, tmp_path):
    circuits = hw.circuits(gpt2, behaviours=False)
    table = pd.read_csv(circuits.save(tmp_path / "heads.csv"))
    assert len(table) == 9
    np.testing.assert_allclose(
        table["qk_norm"].to_numpy().reshape(3, 3), circuits.dataset["qk_norm"], rtol=1e-12
    )
    import xarray as xr

    path = circuits.save(tmp_path / "heads.nc")
    with xr.open_dataset(path, engine="h5netcdf") as opened:
        np.testing.assert_array_equal(opened["copying"], circuits.dataset["copying"])
    with pytest.raises(FileError, match="holds circuits, without a scan"):
        io.load(path)
    with pytest.raises(FileError, match=r"cannot save circuits as heads\.txt"):
        circuits.save(tmp_path / "heads.txt")
    assert len(head_weights(gpt2).layers) == 3


def test_a_scan_takes_circuits_in_by_module(gpt2, tmp_path):
    circuits = hw.circuits(gpt2, behaviours=False)
    scan = hw.scan(gpt2, list(range(20)), layers=[0, 2])
    both = with_circuits(scan, circuits)
    np.testing.assert_array_equal(both["qk_norm"], circuits.dataset["qk_norm"][[0, 2]])
    pairs = circuits.dataset["composition_q"].values
    np.testing.assert_array_equal(both["composition_q"].values[1, :, 0], pairs[2, :, 0])
    again = hw.load_scan(io.save(both, tmp_path / "both.nc"))
    assert again.identical(both)
    assert about(again)["circuits"]["exactness"].startswith("exact")
    part = joined(scan.dataset, hw.circuits(gpt2, layers=[2], behaviours=False).dataset)
    assert np.isnan(part["qk_norm"].values[0]).all()
    np.testing.assert_array_equal(part["qk_norm"][1], both["qk_norm"][1])
