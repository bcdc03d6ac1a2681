"""Two models on one text, side by side: xarray lines up what has the same layer and head.

    python examples/compare_two_models.py MODEL OTHER [--tokens N]

Useful for a base model and its fine-tuned form, or for one model in two precisions.
"""

import argparse

import xarray as xr

import headwise as hw

STATISTICS = ["entropy_fraction", "sink_mass", "previous_mass", "distance", "max_logit"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs=2, metavar="MODEL", help="folder, hub id or .gguf file")
    parser.add_argument("--tokens", type=int, default=512)
    options = parser.parse_args()
    sets = [
        hw.scan(model, tokens=options.tokens).dataset[STATISTICS].reset_coords(drop=True)
        for model in options.models
    ]
    # Layers or heads that only one of the two has become NaN in the other.
    both = xr.concat(sets, dim=xr.Variable("model", ["first", "second"]), join="outer")

    print("means over heads and layers")
    print(both.mean(["layer", "head"]).to_dataframe().round(4).T.to_string())
    print()
    difference = both.sel(model="second") - both.sel(model="first")
    print("the head that differs most")
    for name in STATISTICS:
        change = difference[name].stack(place=["layer", "head"]).dropna("place")
        if not change.size:
            continue
        place = int(abs(change).argmax("place"))
        layer, head = change["place"].to_numpy()[place]
        print(f"{name:18} layer {layer}, head {head}: {float(change[place]):+.4f}")


if __name__ == "__main__":
    main()
