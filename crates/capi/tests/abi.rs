//! Compares the built `libibverbs.so.1` with rdma-core's: exported symbols and their versions, struct
//! layouts, and the results of pure functions. Programs and providers linked against rdma-core's must
//! resolve. `make lib` builds it first; without it these tests fail.

mod support;

use std::{
    collections::BTreeSet,
    env, fs,
    path::{Path, PathBuf},
    process::Command,
};

use support::{compile, library_dir, output};

/// Programs of `perftest` and `ibverbs-utils` that must start on the library unchanged. perftest links
/// libmlx5, libefa and librdmacm, bound at load time.
const PROGRAMS: [&str; 9] = [
    "ib_read_bw",
    "ib_read_lat",
    "ib_send_bw",
    "ib_send_lat",
    "ib_write_bw",
    "ib_write_lat",
    "ibv_devinfo",
    "ibv_rc_pingpong",
    "ibv_srq_pingpong",
];

/// Libraries of those programs that import symbols from libibverbs.
const LIBRARIES: [&str; 3] = ["libefa.so.1", "libmlx5.so.1", "librdmacm.so.1"];

/// `node type name` of each symbol that `library` defines.
fn exported(library: &Path) -> BTreeSet<String> {
    let mut readelf = Command::new("readelf");
    let table = output(readelf.args(["--dyn-syms", "--wide"]).arg(library), "install binutils");
    table
        .lines()
        .filter_map(|line| {
            let words: Vec<&str> = line.split_whitespace().collect();
            let [_, _, _, kind, _, _, section, symbol] = words[..] else { return None };
            // The version nodes themselves are absolute symbols in some linkers' output.
            if ["UND", "ABS", "Ndx"].contains(&section) {
                return None;
            }
            let (name, node) = symbol.split_once("@@").unwrap_or((symbol, "no-default-version"));
            Some(format!("{node} {kind} {name}"))
        })
        .collect()
}

#[test]
fn it_exports_what_rdma_core_exports_and_nothing_else() {
    let expected: BTreeSet<String> = include_str!("rdma-core-44.symbols")
        .lines()
        .filter(|line| !line.starts_with('#'))
        .map(str::to_owned)
        .collect();
    assert!(expected.contains("IBVERBS_1.1 FUNC ibv_open_device"), "the list is read");
    let ours = exported(&library_dir().join("libibverbs.so.1"));
    let missing: Vec<_> = expected.difference(&ours).collect();
    let extra: Vec<_> = ours.difference(&expected).collect();
    assert!(missing.is_empty() && extra.is_empty(), "missing: {missing:#?}\nextra: {extra:#?}");
}

/// `file` in one of the folders of PATH.
fn program(name: &str) -> PathBuf {
    let path = env::var_os("PATH").unwrap_or_default();
    env::split_paths(&path)
        .map(|dir| dir.join(name))
        .find(|file| file.is_file())
        .unwrap_or_else(|| panic!("{name} is not in PATH: apt-get install perftest ibverbs-utils"))
}

/// The libraries that the dynamic linker resolves for `file` with our library first: name → path, as `ldd`
/// prints them. Panics on a symbol or version that does not resolve.
fn resolve(file: &Path) -> Vec<(String, PathBuf)> {
    let dir = library_dir();
    let mut ldd = Command::new("ldd");
    ldd.arg("-r").arg(file).env("LD_LIBRARY_PATH", &dir);
    let text = output(&mut ldd, "");
    for complaint in ["undefined symbol", "not found", "no version information", "not defined in"] {
        assert!(!text.contains(complaint), "{}:\n{text}", file.display());
    }
    let loaded: Vec<(String, PathBuf)> = text
        .lines()
        .filter_map(|line| {
            let (name, rest) = line.trim().split_once(" => ")?;
            Some((name.to_owned(), PathBuf::from(rest.split(" (0x").next()?)))
        })
        .collect();
    let ours = ("libibverbs.so.1".to_owned(), dir.join("libibverbs.so.1"));
    assert!(loaded.contains(&ours), "{} does not load {ours:?}:\n{text}", file.display());
    loaded
}

#[test]
fn programs_providers_and_rdma_cm_resolve_every_symbol() {
    let mut libraries = BTreeSet::new();
    for name in PROGRAMS {
        libraries.extend(resolve(&program(name)));
    }
    for name in LIBRARIES {
        let (_, path) = libraries
            .iter()
            .find(|(loaded, _)| loaded == name)
            .unwrap_or_else(|| panic!("no program loads {name}: {libraries:#?}"));
        resolve(path);
    }
}

/// Compiles `source` as a program against the installed verbs headers and library.
fn compile_source(dir: &Path, name: &str, source: &str) -> PathBuf {
    let file = dir.join(name).with_extension("c");
    fs::write(&file, source).expect("source written");
    compile(&file, &dir.join(name))
}

/// Compares size and field offsets of a struct as the C compiler and as this crate sees it.
macro_rules! layouts {
    ($($name:ident { $($field:ident),+ $(,)? })+) => {
        const LAYOUTS: &[(&str, usize, &[(&str, usize)])] = &[$((
            stringify!($name),
            size_of::<millstream_capi::sys::$name>(),
            &[$((
                stringify!($field),
                std::mem::offset_of!(millstream_capi::sys::$name, $field),
            )),+],
        )),+];
    };
}

layouts! {
    ibv_device { node_type, name, ibdev_path }
    ibv_context { device, ops, cmd_fd, async_fd, num_comp_vectors, mutex, abi_compat }
    ibv_context_ops { alloc_mw, poll_cq, req_notify_cq, post_srq_recv, post_send, post_recv }
    verbs_context { query_port, create_cq_ex, priv_, query_device_ex, create_qp_ex, sz, context }
    ibv_device_attr { fw_ver, max_qp, device_cap_flags, atomic_cap, phys_port_cnt }
    ibv_port_attr { state, port_cap_flags, lid, link_layer, flags, port_cap_flags2 }
    ibv_mr { context, addr, length, lkey, rkey }
    ibv_comp_channel { context, fd, refcnt }
    ibv_cq { context, channel, cq_context, cqe, mutex, cond, comp_events_completed }
    ibv_qp_init_attr { send_cq, cap, qp_type, sq_sig_all }
    ibv_qp_attr { qp_state, qkey, cap, ah_attr, alt_ah_attr, pkey_index, timeout, rate_limit }
    ibv_qp { context, pd, send_cq, qp_num, state, mutex, events_completed }
    ibv_qp_ex { qp_base, comp_mask, wr_id, wr_flags, wr_atomic_cmp_swp, wr_set_sge, wr_abort, wr_atomic_write }
    ibv_cq_ex { cqe, async_events_completed, comp_mask, status, wr_id, start_poll, read_completion_wallclock_ns }
    ibv_qp_init_attr_ex { send_cq, cap, comp_mask, pd, create_flags, source_qpn, send_ops_flags }
    ibv_cq_init_attr_ex { cqe, channel, comp_vector, wc_flags, comp_mask, flags, parent_domain }
    ibv_device_attr_ex { odp_caps, completion_timestamp_mask, cq_mod_caps, max_dm_size, phys_port_cnt_ex }
    ibv_values_ex { comp_mask, raw_clock }
    ibv_srq { context, pd, mutex, cond, events_completed }
    ibv_sge { addr, length, lkey }
    ibv_send_wr { wr_id, next, sg_list, num_sge, opcode, send_flags, wr, qp_type }
    ibv_recv_wr { wr_id, next, sg_list, num_sge }
    ibv_wc { wr_id, status, opcode, byte_len, qp_num, src_qp, wc_flags, pkey_index, slid }
    ibv_async_event { element, event_type }
    ibv_ah_attr { grh, dlid, is_global, port_num }
    ibv_gid_entry { gid, gid_index, gid_type, ndev_ifindex }
}

#[test]
fn structs_lie_in_memory_as_the_c_compiler_lays_them() {
    let mut expected = String::new();
    let mut source = "#include <infiniband/verbs.h>\n#include <stdio.h>\nint main(void) {\n".to_owned();
    for (name, size, fields) in LAYOUTS {
        expected += &format!("{name} {size}\n");
        source += &format!("printf(\"{name} %zu\\n\", sizeof(struct {name}));\n");
        for (field, offset) in *fields {
            // bindgen's name for the field `priv`, which is a Rust keyword.
            let in_c = field.strip_suffix('_').unwrap_or(field);
            expected += &format!("{name}.{field} {offset}\n");
            source += &format!("printf(\"{name}.{field} %zu\\n\", offsetof(struct {name}, {in_c}));\n");
        }
    }
    source += "return 0;\n}\n";
    let dir = tempfile::tempdir().expect("temporary directory");
    let printed = output(&mut Command::new(compile_source(dir.path(), "layout", &source)), "");
    assert_eq!(printed, expected);
}

/// A program that prints the results of every pure function over its whole range and beyond.
const PURE_FUNCTIONS: &str = r#"
#include <infiniband/verbs.h>
#include <stdio.h>
#define TEXT(f, last) for (int i = -2; i <= last; i++) printf(#f " %d %s\n", i, f(i));
#define NUMBER(f, last) for (int i = -2; i <= last; i++) if (f(i) > 0) printf(#f " %d %d\n", i, f(i));
int main(void) {
    TEXT(ibv_node_type_str, 10)
    TEXT(ibv_port_state_str, 8)
    TEXT(ibv_event_type_str, 24)
    TEXT(ibv_wc_status_str, 28)
    NUMBER(ibv_rate_to_mult, 64)
    NUMBER(ibv_rate_to_mbps, 64)
    NUMBER(mult_to_ibv_rate, 1000)
    NUMBER(mbps_to_ibv_rate, 1500000)
    return 0;
}
"#;

#[test]
fn pure_functions_answer_as_the_installed_library_does() {
    let dir = tempfile::tempdir().expect("temporary directory");
    let program = compile_source(dir.path(), "pure", PURE_FUNCTIONS);
    let installed = output(Command::new(&program).env_remove("LD_LIBRARY_PATH"), "");
    assert!(installed.contains("ibv_wc_status_str 12 transport retry counter exceeded"));
    let ours = output(Command::new(&program).env("LD_LIBRARY_PATH", library_dir()), "");
    assert_eq!(ours, installed);
}
