"""The parity matrix on the command line: `--parity=full` runs every cell and ends with a table of errors."""

import pytest

TABLE = pytest.StashKey[dict]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--parity", choices=("core", "full"), default="core", help="cells of the parity matrix to run")


@pytest.fixture
def parity_table(request: pytest.FixtureRequest) -> dict:
    """Case -> its errors, printed at the end."""
    return request.config.stash.setdefault(TABLE, {})


def pytest_terminal_summary(terminalreporter, config: pytest.Config) -> None:
    """Largest errors against the bounds, by stage, precision and offload."""
    rows: dict[tuple, list] = {}
    for case, errors in config.stash.get(TABLE, {}).items():
        rows.setdefault((case.stage, case.offload, case.precision), []).append(errors)
    if not rows or config.getoption("--parity", "core") != "full":
        return
    terminalreporter.section("parity with the reference loop: largest error / its bound, and their largest ratio")
    head = f"{'ZeRO':<22}{'precision':<11}{'cases':>5}" + "".join(f"{name:>28}" for name in ("loss", "norm", "weights"))
    terminalreporter.write_line(head)
    for (stage, offload, precision), group in sorted(rows.items()):
        line = f"{stage} {'offload ' + offload if offload else '':<20}{precision:<11}{len(group):>5}"
        for name in ("loss", "norm", "weights"):
            worst = max(group, key=lambda errors: getattr(errors, name) / errors.bounds[name])
            error, bound = getattr(worst, name), worst.bounds[name]
            line += f"{f'{error:.1e} / {bound:.1e} = {error / bound:.2f}':>28}"
        terminalreporter.write_line(line)
