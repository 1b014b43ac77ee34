"""Runs that outlive a rank and a host."""

from tests.cluster.launches import Launch, start


def words_of(done) -> list[str]:
    return done.rank(0)["arguments"]


def test_a_run_goes_on_from_its_checkpoint_after_a_killed_rank(two_hosts):
    flags = ["--max-restarts", "2"]
    done = start(two_hosts, *flags, fails=1, how="kill", once=True, at=5, save_every=2, steps=7).done()
    assert (done.code, done.left, done.err) == (0, {}, ""), done
    assert "node1:0: rank 0 begins with step 5\n" in done.out and words_of(done)[-2:] == ["--resume", "auto"]
    [first, failed, again, ended] = done.log
    assert first == {"event": "start", "start": 1, "hosts": "node1, node2", "ranks": 2}
    reason = "rank 1 on node2 was killed by SIGKILL (out of memory?)"
    assert failed == {"event": "ended", "start": 1, "code": 137, "reason": reason, "step": 4}
    assert 0 <= again.pop("lost_s") < 60
    assert again == {
        "event": "restart", "start": 2, "hosts": "node1, node2", "ranks": 2, "reason": reason, "step": 4
    }  # fmt: skip
    assert (ended["code"], ended["step"]) == (0, 6)
    assert f"{reason}; restart 1 of 2 in 1 s" in done.out
    for number in (1, 2):
        assert (done.output / "logs" / f"start-{number}" / "rank-00001-node2.txt").exists()


def test_fewer_hosts_keep_the_global_batch(two_hosts):
    """A host that stays away; what the launcher cannot hear from it, the checkpoint's step, it asks again."""
    flags = ["--max-restarts", "2", "--min-hosts", "1", "--host-wait", "0"]
    flags += ["--hostfile", str(two_hosts.hostfile(2))]
    sets = ["--set", "train_micro_batch_size_per_gpu=3", "gradient_accumulation_steps=2"]
    launch = Launch(two_hosts, flags, sets, {"steps": 40, "save_every": 3, "step_s": 0.1})
    launch.wait_for("rank 3 step 4")
    two_hosts.halt("node2")
    try:
        done = launch.done()
    finally:
        two_hosts.power_on("node2")
    assert (done.code, done.left) == (0, {}), done
    again = next(row for row in done.log if row["event"] == "restart")
    assert (again["hosts"], again["ranks"], again["reason"]) == ("node1", 2, "node2: lost")
    assert again["step"] >= 3 and f"begins with step {again['step'] + 1}\n" in done.out
    assert "going on with 1 of 2 hosts: node1" in done.out
    variables = done.rank(1)["environment"]
    assert (variables["WORLD_SIZE"], variables["MASTER_ADDR"]) == ("2", "127.0.0.1")
    # 3 x 2 x 4 ranks = 24 = 3 x 4 x 2 ranks
    wanted = {"train_micro_batch_size_per_gpu=3", "gradient_accumulation_steps=4", "train_batch_size=24"}
    assert wanted <= set(words_of(done)) and "gradient_accumulation_steps=2" not in words_of(done)
