//! IOMMUs and ATS in site files: what is valid, and what is refused by line, field and value.

use millstream_site::iommu::Iommu;
use millstream_site::parse;

fn site(host: &str, adapter: &str, ats: &str) -> String {
    format!(
        r#"name = "s"
[[host]]
name = "a"
{host}
[[host.socket]]
processor = "EPYC 7742"
cores = 64
clock = "2.25 GHz"
memory = "256 GiB"
[[host.adapter]]
name = "hca"
model = "{adapter}"
parent = "socket0"
pcie = {{ generation = 4, lanes = 16 }}
{ats}
"#
    )
}

const IOMMU: &str = "iommu = { page = \"4 KiB\", footprint = \"1 GiB\" }";

#[test]
fn a_host_has_no_iommu_unless_the_file_says_so() {
    let off = parse("t", &site("", "ConnectX-7", "")).unwrap();
    assert!(off.hosts[0].iommu.is_none() && !off.hosts[0].devices[0].ats);
    let on = parse("t", &site(IOMMU, "ConnectX-7", "ats = true")).unwrap();
    let Some(Iommu { page, footprint }) = on.hosts[0].iommu else { panic!("{:?}", on.hosts[0]) };
    assert_eq!((page.0, footprint.0, on.hosts[0].devices[0].ats), (4096, 1 << 30, true));
    assert!(parse("t", &site("", "ConnectX-4", "ats = false")).is_ok());
}

#[test]
fn invalid_translation_is_refused_with_line_field_and_value() {
    for (host, adapter, ats, line, words) in [
        (
            "iommu = { page = \"8 KiB\", footprint = \"1 GiB\" }",
            "ConnectX-7",
            "",
            4,
            "iommu.page = 8 KiB: must be \"4 KiB\"",
        ),
        (
            "iommu = { page = \"2 MiB\", footprint = \"1 MiB\" }",
            "ConnectX-7",
            "",
            4,
            "iommu.footprint = 1 MiB: must be at least one page of 2 MiB",
        ),
        (
            "iommu = { page = \"4 KiB\", footprint = \"1 TiB\" }",
            "ConnectX-7",
            "",
            4,
            "iommu.footprint = 1 TiB: the host has 256 GiB of memory",
        ),
        ("iommu = { page = \"4 KiB\", footprint = \"0 B\" }", "ConnectX-7", "", 4, "above zero"),
        ("iommu = { page = \"4 KiB\" }", "ConnectX-7", "", 4, "footprint"),
        ("iommu = { page = \"4 KiB\", footprint = \"1 GiB\", on = true }", "ConnectX-7", "", 4, "on"),
        ("", "ConnectX-7", "ats = true", 15, "ats = true: host \"a\" has no IOMMU"),
        (
            IOMMU,
            "ConnectX-4",
            "ats = true",
            15,
            "a \"ConnectX-4\" has no address translation cache; adapters that have: ",
        ),
        (IOMMU, "ConnectX-7", "ats = 1", 15, "boolean"),
    ] {
        let error = parse("site.toml", &site(host, adapter, ats)).unwrap_err();
        assert!(error.to_string().contains(words), "{error}");
        assert_eq!(error.line, Some(line), "{error}");
    }
}
