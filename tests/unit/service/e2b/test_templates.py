"""The register of templates, and what the steps of a build come down to."""

import pytest

from untax.core.errors import UsageError
from untax.service.admission import Admission
from untax.service.e2b.builds import Position, checked_steps
from untax.service.e2b.templates import Templates
from untax.service.errors import Refused
from untax.service.tenants import Allowance, Tenant

ALICE = Tenant("alice")


def register(tmp_path, **options) -> Templates:
    return Templates(
        tmp_path / "e2b" / "templates.json",
        "host",
        {"python:3.12": "docker:python:3.12"},
        Admission(("host", "registry:*")).check,
        **options,
    )


async def test_a_template_is_found_once_it_is_built_and_by_its_tenant_only(tmp_path):
    templates = register(tmp_path)
    template, build = templates.request(ALICE, {"name": "mine:v1", "tags": ["v2"]})
    with pytest.raises(Refused):
        templates.ready("alice", "mine")
    await templates.finished(template, build)
    assert templates.ready("alice", "mine")[1] is build
    assert templates.ready("alice", "mine:v2")[1] is build
    for tenant, name in (("bob", "mine"), ("bob", template.id), ("alice", "mine:v3"), ("alice", "other")):
        with pytest.raises(Refused) as refused:
            templates.ready(tenant, name)
        assert refused.value.status == 404


async def test_the_register_outlives_the_server(tmp_path):
    templates = register(tmp_path)
    template, build = templates.request(ALICE, {"name": "mine"})
    build.env, build.snapshot = {"A": "b"}, "snap-0"
    await templates.finished(template, build)
    again = register(tmp_path)
    again.load()
    assert again.ready("alice", "mine")[1].env == {"A": "b"}
    assert await again.remove(again.find("alice", "mine")) == ["snap-0"]


def test_an_image_is_the_operators_to_allow(tmp_path):
    templates = register(tmp_path)
    assert templates.image_for("python:3.12") == "docker:python:3.12"
    assert templates.image_for("e2bdev/base:latest") == "host"
    assert templates.image_for("node:22") == "registry:node:22"
    for name in ("dir:/etc", "docker:secret", "--privileged", "a\nb", "", "debian:bookworm"):
        with pytest.raises((Refused, UsageError)):
            templates.image_for(name)


@pytest.mark.parametrize("name", ["", "--privileged", "a b", "base", "$(id)", "a\n", "x" * 200])
def test_a_name_that_is_none_is_refused(tmp_path, name):
    with pytest.raises(UsageError):
        register(tmp_path).request(ALICE, {"name": name})


def test_a_step_changes_the_key_and_what_follows_begins_with():
    start = Position("image:host")
    env = start.after({"type": "ENV", "args": ["A", "1"], "filesHash": None})
    run = env.after({"type": "RUN", "args": ["make"], "filesHash": None})
    assert (env.env, run.env) == ({"A": "1"}, {"A": "1"})
    assert len({start.key, env.key, run.key, start.after({"type": "RUN", "args": ["make"], "filesHash": None}).key}) == 4
    work = run.after({"type": "WORKDIR", "args": ["src"], "filesHash": None})
    assert (work.cwd, work.after({"type": "USER", "args": ["root"], "filesHash": None}).home) == ("/home/user/src", "/root")


@pytest.mark.parametrize(
    "steps",
    [
        "RUN",
        [{}],
        [{"type": "EXEC", "args": ["x"]}],
        [{"type": "RUN"}],
        [{"type": "COPY", "args": ["a", "b"], "filesHash": "../x"}],
        [{"type": "ENV", "args": ["A=B", "c"]}],
        [{"type": "RUN", "args": [1]}],
    ],
)
def test_steps_that_are_none_are_refused(steps):
    with pytest.raises(UsageError):
        checked_steps(steps)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"format": 1}', '{"format": 1, "templates": [{"id": "t"}]}', '{"format": 1, "templates": [7]}']
)
async def test_a_damaged_register_is_set_aside_and_stops_nobody(tmp_path, caplog, text):
    templates = register(tmp_path)
    place = tmp_path / "e2b" / "templates.json"
    place.parent.mkdir()
    place.write_text(text)
    templates.load()
    assert list(templates) == [] and place.with_suffix(".damaged").read_text() == text and "damaged" in caplog.text
    await templates.save()
    register(tmp_path).load()
    assert place.stat().st_mode & 0o777 == 0o600


def test_a_register_of_another_release_is_not_touched(tmp_path):
    place = tmp_path / "e2b" / "templates.json"
    place.parent.mkdir()
    place.write_text('{"format": 9}')
    with pytest.raises(UsageError):
        register(tmp_path).load()
    assert place.exists()


async def test_a_tenant_has_so_many_templates_and_no_more(tmp_path):
    """Another build of one that is there is no further template, another tenant has room of its own, and a deleted one makes room."""
    templates = register(tmp_path)
    alice, bob = (Tenant(name, Allowance(templates=2)) for name in ("alice", "bob"))
    first, _ = templates.request(alice, {"name": "one"})
    templates.request(alice, {"name": "two"})
    with pytest.raises(Refused, match="2 templates already: delete some") as refused:
        templates.request(alice, {"name": "three"})
    assert refused.value.status == 429
    assert "three" not in {one.name for one in templates}
    templates.request(alice, {"name": "one"})
    templates.request(bob, {"name": "three"})
    await templates.remove(first)
    templates.request(alice, {"name": "three"})


def test_builds_that_are_not_over_are_bounded_and_those_that_were_given_up_make_room(tmp_path):
    """One under way is never forgotten for another; one that failed, or was never begun for an hour, is."""
    templates = register(tmp_path)
    alice = Tenant("alice", Allowance(builds=3))
    made = [templates.request(alice, {"name": name}) for name in ("a", "b", "c")]
    for _, build in made:
        build.status = "building"
    with pytest.raises(Refused, match="3 builds of alice are under way") as refused:
        templates.request(alice, {"name": "d"})
    assert refused.value.status == 429
    made[1][1].status = "error"
    made[2][1].status, made[2][1].created = "waiting", made[2][1].created - 7200
    templates.request(alice, {"name": "d"})
    assert not made[2][0].pending
    templates.request(alice, {"name": "d"})
    assert not made[1][0].pending
    with pytest.raises(Refused):
        templates.request(alice, {"name": "d"})
    assert templates.build_of("alice", made[0][0].id, made[0][1].id)[1] is made[0][1]
