"""Bad input of ``headwise cost`` ends in one line on stderr, exit code 2, and no file."""

from __future__ import annotations

import json

import pytest

import headwise as hw
from headwise.cli.app import run
from tests.cost.as_files import BIG, config, write


def faults(folder):
    """Files that are no configurations, and some that are and must not be written over."""
    (folder / "broken.json").write_text(json.dumps(BIG)[:-7], encoding="utf-8")
    (folder / "list.json").write_text("[1, 2]", encoding="utf-8")
    (folder / "as.csv").write_text(json.dumps(BIG), encoding="utf-8")
    for name in ("folder", "model", "own"):
        (folder / name).mkdir()
    write(folder / "model", config=BIG)
    small = hw.models.preset("tiny").model_dump(mode="json")
    write(folder / "own", architecture=small)
    write(
        folder,
        few={"model_type": "llama", "hidden_size": 40},
        zero={**BIG, "hidden_size": 0},
        uneven={**config("gpt2"), "n_head": 7},
        unet={"_class_name": "UNet2DConditionModel", "act_fn": "silu"},
        rwkv={"model_type": "rwkv", "hidden_size": 40},
        odd={**BIG, "hidden_size": 44, "num_attention_heads": 4, "num_key_value_heads": 2},
    )


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with two configurations that are right, and many files that are not."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HEADWISE_TRACEBACK", raising=False)
    write(tmp_path, gpt2=config("gpt2"), t5=config("t5"))
    faults(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("", "no model is named; allowed: a config.json"),
        ("broken.json", "broken.json holds no JSON: "),
        ("list.json", "list.json holds no JSON object"),
        ("few.json", "few.json has no num_attention_heads; add the key"),
        ("zero.json", "hidden_size is 0 in zero.json; allowed: a whole number"),
        ("uneven.json", "uneven.json"),
        ("unet.json", "has no model_type: it is of diffusers ('UNet2DConditionModel'); allowed: "),
        ("rwkv.json", "has the model type 'rwkv'; allowed: arcee, bart, bert"),
        ("no/such/model", "there is no file or folder no/such/model"),
        ("folder", "folder has no config.json"),
        ("gpt2.json rwkv.json", "has the model type 'rwkv'"),
        ("gpt2.json --length 0", "--length '0'; allowed: numbers from 1 on"),
        ("gpt2.json --length 5,-3", "--length '5,-3'; allowed"),
        ("gpt2.json --length many", "--length 'many'; allowed"),
        ("gpt2.json --length 9999999999999", "length is 9999999999999; allowed: 1 to 1,000,000"),
        ("gpt2.json --batch 0", "batch is 0; allowed: 1 to"),
        ("gpt2.json --batch -2", "batch is -2; allowed: 1 to"),
        ("gpt2.json --cached -1", "cached is -1; allowed: 0 to"),
        ("t5.json --source -1", "source is -1; allowed: 1 to"),
        ("gpt2.json --source 5", "5 tokens of a source for a model of one stack"),
        ("gpt2.json --documents 3,4 --length 8", "documents of 7 tokens in a sequence of 8"),
        ("gpt2.json --documents a", "--documents 'a'; allowed"),
        ("gpt2.json --pairs some", "pairs is 'some'; allowed: all or visible"),
        ("gpt2.json --logits no", "logits is 'no'; allowed: all or last"),
        ("gpt2.json --attention flash", "attention is 'flash'; allowed: fused or materialised"),
        ("gpt2.json --recompute half", "recompute is 'half'; allowed: none or selective or full"),
        ("gpt2.json --weights q9", "the number format 'q9'; allowed: float64, "),
        ("gpt2.json --cache q4_k", "a cache in q4_k; allowed: float64, "),
        ("gpt2.json --optimizer lion", "the optimizer 'lion'; allowed: sgd, "),
        ("gpt2.json --on abacus", "no machine is called 'abacus'; allowed: "),
        ("gpt2.json --on none.toml", "cannot read none.toml: no such file"),
        ("gpt2.json --on t4", "no rate of bfloat16 is known for NVIDIA T4; allowed: float32"),
        ("gpt2.json --memory much", "--memory 'much'; allowed: bytes, or a number with GB"),
        ("gpt2.json --memory 80XB", "--memory '80XB'; allowed"),
        ("gpt2.json --memory 0GB", "--memory '0GB'; allowed: more than nothing"),
        ("gpt2.json --memory -1", "--memory '-1'; allowed"),
        ("gpt2.json --efficiency 0.5", "--efficiency without a machine; add --on"),
        ("gpt2.json --on h200 --efficiency 2", "efficiency is 2.0; allowed: above 0, up to 1"),
        ("gpt2.json --on h200 --efficiency nan", "efficiency is nan; allowed"),
        ("gpt2.json --tokens-per-second 5", "--tokens-per-second without a machine; add --on"),
        ("gpt2.json --on h200 --tokens-per-second -1", "--tokens-per-second -1.0; allowed"),
        ("gpt2.json --on h200 --tokens-per-second nan", "--tokens-per-second nan; allowed"),
        ("gpt2.json --on h200 --tokens-per-second 5 --devices 0", "--devices 0; allowed: 1"),
        ("gpt2.json --devices 3", "--devices without --tokens-per-second"),
        ("gpt2.json --out x.txt", "x.txt as a file; allowed: a name that ends in .html"),
        ("gpt2.json --csv x.html", "x.html as a file; allowed: a name that ends in .csv"),
        ("gpt2.json --csv no/x.csv", "there is no folder no"),
        ("gpt2.json --json gpt2.json", "gpt2.json is read, so it cannot be written over"),
        ("as.csv --csv as.csv", "as.csv is read, so it cannot be written over"),
        ("model --json model/config.json", "model/config.json is read, so it cannot"),
        ("gpt2.json --save-machine m.toml", "--save-machine without --calibrate"),
        ("gpt2.json --calibrate --save-machine m.txt", "a name that ends in .toml"),
        ("gpt2.json --calibrate --on h200", "--calibrate and --on were given"),
        ("gpt2.json --length 1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20,21,22,23,24,25",
         "1 model at 25 lengths; allowed: 24 columns in all"),
        ("--d-model 64", "explicit sizes without --layers; allowed: --d-model, "),
        ("gpt2.json --gated", "explicit sizes without --d-model"),
        ("--d-model 40 --layers 3 --heads 7 --vocab 97", "7 heads do not divide d_model 40"),
        ("--d-model 0 --layers 3 --heads 4 --vocab 97", "d_model is 0; allowed"),
        ("--d-model -40 --layers 3 --heads 4 --vocab 97", "d_model is -40; allowed"),
        ("--d-model 40 --layers 3 --heads 4 --vocab 97 --kv-heads 0", "kv_heads is 0; allowed"),
        ("--d-model 40 --layers 3 --heads 4 --vocab 97 --kv-heads 3", "4 query heads cannot share"),
        ("--d-model 40 --layers 99999 --heads 4 --vocab 97", "layers is 99999; allowed"),
        ("--d-model 40 --layers 3 --heads 4 --vocab 97 --experts-used 2", "without --experts"),
        ("--d-model 40 --layers 3 --heads 4 --vocab 97 --window 5 --encoder", "--window with"),
        ("--d-model 40 --layers 3 --heads 4 --vocab 97 --verify", "--verify of explicit sizes"),
        ("own --verify", "--verify of own/architecture.json; allowed: a config.json of"),
        ("odd.json --verify", "transformers cannot build LlamaForCausalLM: "),
        ("gpt2.json --frobnicate", "no such option: --frobnicate"),
        ("gpt2.json --batch x", "invalid value for '--batch'"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_one_line(here, capsys, line, says):
    before = {path: path.read_bytes() for path in here.rglob("*") if path.is_file()}
    outputs = [] if "--json" in line else ["--json", "all.json"]
    outputs += [] if "--csv" in line else ["--csv", "all.csv"]
    outputs += [] if "--out" in line else ["--out", "all.html"]
    assert run(["cost", *line.split(), *outputs]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("headwise: ")
    assert says in err
    assert err.count("\n") == 1
    assert {path: path.read_bytes() for path in here.rglob("*") if path.is_file()} == before
