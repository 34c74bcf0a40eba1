"""Built-in clusters by name, own ones by TOML: what they hold, and what is refused."""

from pathlib import Path

import pytest

from autopar.errors import FileError, UsageError
from autopar.formats.cluster import Cluster
from autopar.hardware.clusters import EXAMPLES, cluster_named, find_cluster, is_file, read_cluster
from autopar.hardware.collectives import NETWORK_SHARE
from autopar.hardware.gpus import GPUS

LAB = """
name = "lab"

[[nodes]]
count = 2
gpus = 4
gpu = "A100-80G"
price_per_hour = 2

[[nodes]]
gpus = 8
gpu = "v100"
memory = "16GB"
bandwidth = "40GB/s"

[network]
bandwidth = "100Gbps"
latency_s = 5e-6
"""


@pytest.fixture
def lab(tmp_path: Path) -> Path:
    path = tmp_path / "lab.toml"
    path.write_text(LAB)
    return path


@pytest.mark.parametrize("name", [*EXAMPLES, *(f"2x4x{gpu.name}:400Gbps" for gpu in GPUS), "1xH100", "3x1xL40S"])
def test_every_name_is_a_cluster_whose_curves_rise_and_are_estimated(name: str) -> None:
    cluster = cluster_named(name)
    assert cluster.name == name
    assert {device.memory_bytes for device in cluster.devices} < {gpu.memory_bytes for gpu in GPUS}
    keys = [(curve.kind, curve.ranks, curve.level, curve.nodes) for curve in cluster.curves]
    assert len(keys) == len(set(keys))
    for curve in cluster.curves:
        assert curve.provenance == "estimated"
        assert len(curve.sizes) == 12
        assert list(curve.seconds) == sorted(set(curve.seconds)) or curve.kind != "p2p"
        assert list(curve.seconds) == sorted(curve.seconds)
    assert Cluster.parse(cluster.dumps(), Path("cluster.json")) == cluster


def test_a_name_says_nodes_gpus_and_the_network_of_a_node_and_adds_nodes_with_other_gpus() -> None:
    cluster = cluster_named("4x8xA100-80G:200Gbps")
    assert [device.node for device in cluster.devices] == [node for node in range(4) for _ in range(8)]
    assert {curve.ranks for curve in cluster.curves if curve.level == "node"} == {2, 4, 8}
    assert {(curve.nodes, curve.ranks) for curve in cluster.curves if curve.level == "network"} == {
        (None, 2),
        *((nodes, nodes * each) for nodes in (2, 4) for each in (1, 2, 4, 8)),
    }
    network = next(link for link in cluster.links if link.level == "network")
    assert network.bytes_per_s == pytest.approx(0.8 * 25e9)
    assert network.shared_by == 8
    assert cluster_named("4x8xA100-80G:25GB/s").links == cluster.links
    cluster = cluster_named("2x4xA100+8xV100:100Gbps")
    assert [device.type for device in cluster.devices] == ["A100-SXM-80G"] * 8 + ["V100-SXM2-32G"] * 8
    assert [device.node for device in cluster.devices] == [0] * 4 + [1] * 4 + [2] * 8
    assert any("published of A100-SXM-80G, V100-SXM2-32G" in note for note in cluster.notes)
    assert any("the slowest" in note for note in cluster.notes)
    cluster = cluster_named("4xA100+2x8xA100:100Gbps")
    ranks = {each: {curve.ranks for curve in cluster.curves if curve.level == each} for each in ("node", "network")}
    assert ranks == {"node": {2, 4, 8}, "network": {2, 3, 4, 6, 8, 12}}
    assert [link.shared_by for link in cluster.links] == [1, 8]
    assert cluster_named("4xA100+4xA100:100Gbps").links == cluster_named("2x4xA100:100Gbps").links


def test_a_name_says_racks_and_a_network_that_is_not_stated_is_assumed() -> None:
    cluster = cluster_named("2x4x8xH100:400Gbps:100Gbps")
    assert [(device.rack, device.node) for device in cluster.devices[::8]] == [(at // 4, at) for at in range(8)]
    for parts, racks in (("2x2x4xH100+4xH100", [0, 0, 1, 1, 2]), ("4xH100+2x2x4xH100", [0, 1, 1, 2, 2])):
        assert [device.rack for device in cluster_named(f"{parts}:9Gbps:1Gbps").devices[::4]] == racks
    assert [link.level for link in cluster.links] == ["node", "rack", "network"]
    assert [link.shared_by for link in cluster.links] == [1, 8, 8]
    near, far = cluster_named("4x8xH100:400Gbps"), cluster_named("8x8xH100:100Gbps")
    assert cluster.links[1] == near.links[1].model_copy(update={"level": "rack"})
    assert cluster.links[2] == far.links[1]

    def seconds_of(cluster: Cluster, **update: str) -> dict[object, tuple[float, ...]]:
        curves = (curve.model_copy(update=update) for curve in cluster.curves if not update or curve.level != "node")
        return {(curve.level, curve.kind, curve.ranks, curve.nodes): curve.seconds for curve in curves}

    seconds, of_near, of_far = seconds_of(cluster), seconds_of(near, level="rack"), seconds_of(far)
    assert seconds == {**of_near, **of_far}
    cluster = cluster_named("2x4x8xH100:400Gbps")
    assert "400Gbps per node between racks is assumed; 2x4x8xH100:400Gbps:100Gbps would say another" in cluster.notes
    assert cluster.links == cluster_named("2x4x8xH100:400Gbps:400Gbps").links
    assert any("per node is assumed" in note for note in cluster_named("2x4x8xH100").notes)
    cluster = cluster_named("2x4xV100")
    assert "a network of 100Gbps per node is assumed; 2x4xV100:200Gbps would say another" in cluster.notes
    assert cluster.links == cluster_named("2x4xV100:100Gbps").links


def test_a_described_cluster_may_have_racks(tmp_path: Path) -> None:
    nodes = "".join(f'[[nodes]]\nrack={rack}\ncount={count}\ngpus=2\ngpu="V100"\n' for rack, count in ((0, 2), (7, 1)))
    networks = '[rack]\nbandwidth = "100Gbps"\n[network]\nbandwidth = "10Gbps"\nlatency_s = 1e-4\n'
    path = tmp_path / "racks.toml"
    path.write_text(nodes + networks)
    cluster = read_cluster(path)
    assert [device.rack for device in cluster.devices] == [0] * 4 + [7] * 2
    assert [link.level for link in cluster.links] == ["node", "rack", "network"]
    assert cluster.links[2].bytes_per_s == pytest.approx(cluster.links[1].bytes_per_s / 10)
    assert cluster.links[2].latency_s == pytest.approx(cluster.links[1].latency_s + 1e-4)
    for text, message in (
        (nodes + networks[: networks.index("[network]")], "$.network: several racks need a [network]"),
        (nodes + networks[networks.index("[network]") :], "$.rack: nodes in several racks need a [rack]"),
        (nodes + networks.replace("100Gbps", "fast"), "$.rack.bandwidth: "),
        (nodes.replace("rack=7", "rack=-1") + networks, "$.nodes[1].rack: "),
    ):
        path.write_text(text)
        with pytest.raises(FileError) as caught:
            read_cluster(path)
        assert message in str(caught.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("8xH1000", "no GPU called 'H1000' is known; the nearest are H100-SXM"),
        ("0xH100", "has no devices"),
        ("99999x99999xH100", "has 9999800001 devices; at most 65536"),
        ("H100", "a name is [[RACKSx]NODESx]GPUSxGPU[:BANDWIDTH[:BANDWIDTH]]"),
        ("2x8xH100:200Gbps:100Gbps", "has no racks for :100Gbps to connect; write RACKSxNODESxGPUSxGPU"),
        ("2x2x8xH100:200Gbps:slow", "network.bandwidth: 'slow': write bytes"),
        ("-1xH100", "no cluster is called '-1xH100'"),
        ("2x8xH100:fast", "write bytes or bits per second, such as 25GB/s or 200Gbps"),
        ("2x8xH100:0Gbps", "must be at least 1"),
        ("", "no cluster is called ''"),
        ("8xH100:1Gbps+8xA100", "no cluster is called '8xH100:1Gbps+8xA100'"),
        ("8xH100+0xA100", "cluster '8xH100+0xA100' has no devices in 0xA100"),
        ("65536xH100+1xA100", "nodes: 65537 devices; at most 65536"),
        ("8xH100:400Gbps", "is one node, which needs no network; leave out :400Gbps"),
        ("1xH100:400Gbps/gpu", "is one node, which needs no network; leave out :400Gbps/gpu"),
        ("8xH100:1GB/s/gpu:1Gbps", "leave out :1GB/s/gpu"),
        ("2x8xH100:400Gbps/rack", "write bytes or bits per second"),
    ],
)
def test_what_is_no_cluster_gets_one_line(name: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        cluster_named(name)
    assert message in str(caught.value)


TOO_LONG = ("x" * 300, "x" * 5000, "8xH100" + "0" * 400, "8xH100" + " " * 400, "8xH100+" * 100, "2x8xH100:" + "9" * 300)
WITHOUT_FILE = ("\0", "8xH100\0", "a/\0", "a\0.toml", "\ud800", "a/\ud800", "x" * 300 + ".json", "/" + "x" * 300)


@pytest.mark.parametrize("name", [*TOO_LONG, *WITHOUT_FILE])
def test_names_that_no_file_can_have_are_names_of_clusters_or_refused_in_a_line(name: str) -> None:
    try:
        said = find_cluster(name).name
    except (FileError, UsageError) as refusal:
        said = str(refusal).replace(name, "")
    assert len(said) < 500
    assert (said == "8xH100") == (name.strip() == "8xH100")
    assert is_file(name) == (name.endswith((".json", ".toml")) or (name in WITHOUT_FILE and "/" in name))


def test_a_described_cluster_is_called_as_its_file_whatever_letters_that_has(tmp_path: Path) -> None:
    for name, shown in (
        ("a\nb", "a b"),
        ("a\x1bb", "a\\x1bb"),
        ("\udcff", "\\udcff"),
        ("\x1b" * 240, "\\x1b" * 62 + "\\x"),
    ):
        path = tmp_path / f"{name}.toml"
        path.write_text('[[nodes]]\ngpus = 2\ngpu = "H100"\n')
        assert read_cluster(path).name == shown


def test_described_clusters_have_racks_mix_nodes_and_are_told_from_names(
    lab: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = read_cluster(lab)
    assert cluster.name == "lab"
    assert [device.node for device in cluster.devices] == [0] * 4 + [1] * 4 + [2] * 8
    assert [device.type for device in cluster.devices] == ["A100-SXM-80G"] * 8 + ["V100-SXM2-32G"] * 8
    assert (cluster.devices[0].price_per_hour, cluster.devices[-1].price_per_hour) == (2.0, None)
    assert (cluster.devices[0].memory_bytes, cluster.devices[-1].memory_bytes) == (80 * 10**9, 16 * 10**9)
    assert any("the slowest" in note for note in cluster.notes)
    reached = next(curve for curve in cluster.curves if (curve.kind, curve.ranks) == ("all_reduce", 8))
    assert 2 * 7 / 8 * reached.sizes[-1] / reached.seconds[-1] == pytest.approx(40e9, rel=0.05)
    cluster_named("8xH100").save(tmp_path / "cluster.json")
    assert read_cluster(tmp_path / "cluster.json") == cluster_named("8xH100")
    monkeypatch.chdir(tmp_path)
    assert all(map(is_file, ("none.json", "deep/cluster", "4x8xA100/lab", "C:\\lab")))
    assert not any(map(is_file, ("8xH100", "4x8xA100-80G:25GB/s", "8xH100+8xA100-80G:25GB/s")))
    Path("8xH100").write_text("")
    assert is_file("8xH100")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("gpus = 4", "gpus = 0", "$.nodes[0].gpus: "),
        ("gpus = 4", "gpus = true", "$.nodes[0].gpus: "),
        ("gpus = 4", 'gpus = 4\ncolour = "red"', "$.nodes[0].colour: "),
        ("gpus = 4", "", "$.nodes[0].gpus: Field required"),
        ('gpu = "v100"', 'gpu = "w100"', "$.nodes[1].gpu: no GPU called 'w100' is known; the nearest are V100"),
        ('memory = "16GB"', 'memory = "lots"', "$.nodes[1].memory: 'lots': write a number and a unit"),
        ('bandwidth = "40GB/s"', 'bandwidth = "40GB"', "$.nodes[1].bandwidth: '40GB': write bytes or bits"),
        ('bandwidth = "100Gbps"', "", "$.network.bandwidth: Field required"),
        ("latency_s = 5e-6", "latency_s = nan", "$.network.latency_s: "),
        ("price_per_hour = 2", "price_per_hour = 2020-02-20", "$.nodes[0].price_per_hour: "),
        ("count = 2", "count = 2\ncount = 3", "not TOML: Cannot overwrite a value (at line 6"),
        ("count = 2", f"count = 0x{'f' * 6000}", "$: holds a huge number"),
        ("count = 2", f"count = {'9' * 6000}", "not TOML: Exceeds the limit"),
        ("count = 2", f"a{'.a' * 100} = 2", "not TOML: nested too deeply"),
        ("count = 2", f"""'a'{' . "a"' * 100} = 2""", "not TOML: nested too deeply"),
        ("count = 2", f"#{'.' * 2**20}", "letters are too many for a description (at most 1,048,576)"),
        ("count = 2", "count = 65000", "$.nodes: 260008 devices"),
        ("[network]", "[net]", "$.net: "),
        (LAB, "", "$.nodes: Field required"),
        (LAB, '[[nodes]]\ncount = 2\ngpus = 1\ngpu = "H100"', "$.network: several nodes need a [network]"),
    ],
)
def test_a_broken_description_is_refused_with_its_key(lab: Path, old: str, new: str, message: str) -> None:
    assert old in LAB
    lab.write_text(LAB.replace(old, new))
    with pytest.raises(FileError) as caught:
        read_cluster(lab)
    assert str(caught.value).startswith(f"{lab}: ")
    assert message in str(caught.value)


@pytest.mark.parametrize("of", ["/gpu", "/device", " / GPU"])
@pytest.mark.parametrize("rate", ["400Gbps", "50GB/s"])
def test_a_bandwidth_of_each_device_is_shared_with_none_and_that_of_all_of_a_node(rate: str, of: str) -> None:
    each, node = cluster_named(f"2x8xH100:{rate}{of}"), cluster_named("2x8xH100:3200Gbps")
    assert not is_file(f"2x8xH100:{rate}{of}")
    link, whole = each.links[1], node.links[1]
    assert (link.bytes_per_s, link.shared_by) == (pytest.approx(50e9 * NETWORK_SHARE), 1)
    assert (whole.bytes_per_s / whole.shared_by, whole.shared_by) == (pytest.approx(link.bytes_per_s), 8)
    for one, other in zip(each.curves, node.curves, strict=True):
        assert one.seconds == pytest.approx(other.seconds)
    assert cluster_named(f"2x8xH100:{rate}/node").links == cluster_named(f"2x8xH100:{rate}").links


def test_devices_may_have_a_bandwidth_each_in_nodes_racks_and_files(tmp_path: Path) -> None:
    racks = cluster_named("2x4x8xH100:400Gbps/gpu:100Gbps")
    assert [(link.level, link.shared_by) for link in racks.links] == [("node", 1), ("rack", 1), ("network", 8)]
    both = cluster_named("2x4x8xH100:100Gbps:400Gbps/gpu")
    assert [(link.level, link.shared_by) for link in both.links] == [("node", 1), ("rack", 8), ("network", 1)]
    assumed = cluster_named("2x4x8xH100:400Gbps/gpu")
    assert "400Gbps/gpu between racks is assumed; 2x4x8xH100:400Gbps/gpu:100Gbps would say another" in assumed.notes
    assert assumed.links == cluster_named("2x4x8xH100:400Gbps/gpu:400Gbps/gpu").links
    mixed = cluster_named("4xA100+8xV100:100Gbps/gpu")
    assert (mixed.links[1].bytes_per_s, mixed.links[1].shared_by) == (pytest.approx(12.5e9 * NETWORK_SHARE), 1)
    path = tmp_path / "lab.toml"
    rates = []
    for said in ('bandwidth="25GB/s/device"', 'bandwidth="400Gbps/gpu"', ""):
        path.write_text(f'[[nodes]]\ngpus=8\ngpu="H100"\n{said}')
        rates.append(read_cluster(path).links[0].bytes_per_s)
    assert rates == sorted(rates)
    assert rates[1] == pytest.approx(2 * rates[0])
    path.write_text('[[nodes]]\ncount=2\ngpus=8\ngpu="H100"\n[network]\nbandwidth="400Gbps/gpu"\nlatency_s = 1e-5\n')
    link = read_cluster(path).links[1]
    assert (link.bytes_per_s, link.shared_by) == (pytest.approx(50e9 * NETWORK_SHARE), 1)
    assert link.latency_s > cluster_named("2x8xH100:400Gbps/gpu").links[1].latency_s
