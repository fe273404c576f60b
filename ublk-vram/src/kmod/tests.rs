//! The mirror of the ABI is what a C compiler makes of the header; mappings are aligned and whole.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::Path;
use std::process::Command;

use super::{Node, RegionMapping, abi};

/// C name, size, and the fields of each structure.
type Structure = (&'static str, usize, Vec<(&'static str, usize, usize)>);

fn structures() -> Vec<Structure> {
    macro_rules! all {
        ($($name:literal $type:ident,)*) => {
            vec![$(($name, size_of::<abi::$type>(), abi::$type::fields())),*]
        };
    }
    all!(
        "uvram_info" Info,
        "uvram_create_bar" CreateBar,
        "uvram_create_nvidia" CreateNvidia,
        "uvram_attach" Attach,
        "uvram_destroy" Destroy,
        "uvram_region" Region,
        "uvram_list" List,
        "uvram_mapping" PageTable,
    )
}

const CONSTANTS: [(&str, u32); 18] = [
    ("UVRAM_ABI", abi::ABI),
    ("UVRAM_CAP_HUGE_PMD", abi::CAP_HUGE_PMD),
    ("UVRAM_CAP_HUGE_PUD", abi::CAP_HUGE_PUD),
    ("UVRAM_CAP_PAT", abi::CAP_PAT),
    ("UVRAM_CREATE_STICKY", abi::CREATE_STICKY),
    ("UVRAM_CREATE_PERSISTENT", abi::CREATE_PERSISTENT),
    ("UVRAM_ATTACH_EXCLUSIVE", abi::ATTACH_EXCLUSIVE),
    ("UVRAM_KIND_BAR", abi::KIND_BAR),
    ("UVRAM_KIND_NVIDIA", abi::KIND_NVIDIA),
    ("UVRAM_REGION_STICKY", abi::REGION_STICKY),
    ("UVRAM_REGION_DEAD", abi::REGION_DEAD),
    ("UVRAM_REGION_EXCLUSIVE", abi::REGION_EXCLUSIVE),
    ("UVRAM_REGION_PERSISTENT", abi::REGION_PERSISTENT),
    ("UVRAM_MODE_WB", abi::MODE_WB),
    ("UVRAM_MODE_WC", abi::MODE_WC),
    ("UVRAM_MODE_UC_MINUS", abi::MODE_UC_MINUS),
    ("UVRAM_MODE_UC", abi::MODE_UC),
    ("UVRAM_MODE_UNKNOWN", abi::MODE_UNKNOWN),
];

#[test]
fn the_mirror_is_the_header() {
    let header = Path::new(env!("CARGO_MANIFEST_DIR")).join("../kmod/uapi/ublk_vram.h");
    let mut source = format!(
        "#include <stdio.h>\n#include <stddef.h>\n#include \"{}\"\nint main(void) {{\n",
        header.display()
    );
    let mut expected = BTreeMap::new();
    let mut ask = |key: String, expression: String, value: usize| {
        writeln!(
            source,
            "printf(\"%s %zu\\n\", \"{key}\", (size_t)({expression}));"
        )
        .unwrap();
        expected.insert(key, value);
    };
    for (name, size, fields) in structures() {
        ask(name.to_owned(), format!("sizeof(struct {name})"), size);
        for (field, offset, size) in fields {
            let member = format!("((struct {name} *)0)->{field}");
            ask(
                format!("{name}.{field}@"),
                format!("offsetof(struct {name}, {field})"),
                offset,
            );
            ask(format!("{name}.{field}"), format!("sizeof({member})"), size);
        }
    }
    for (name, value) in CONSTANTS {
        ask(name.to_owned(), name.to_owned(), value as usize);
    }
    // The numbers carry the sizes: one of each kind is enough.
    let numbers = [
        ("UVRAM_GET_INFO", nix::request_code_read!(0xf7, 0, 16)),
        ("UVRAM_STAT", nix::request_code_readwrite!(0xf7, 7, 72)),
        ("UVRAM_ATTACH", nix::request_code_write!(0xf7, 3, 8)),
        ("UVRAM_DETACH", nix::request_code_none!(0xf7, 4)),
    ];
    for (name, value) in numbers {
        ask(name.to_owned(), name.to_owned(), value as usize);
    }
    source.push_str("return 0; }\n");

    let dir = tempfile::tempdir().unwrap();
    let (file, program) = (dir.path().join("layout.c"), dir.path().join("layout"));
    std::fs::write(&file, source).unwrap();
    let compiled = Command::new("cc")
        .args(["-Wall", "-Werror", "-o"])
        .args([&program, &file])
        .output()
        .unwrap();
    let messages = String::from_utf8_lossy(&compiled.stderr).into_owned();
    assert!(compiled.status.success(), "{messages}");
    let output = Command::new(&program).output().unwrap();
    let found: BTreeMap<String, usize> = String::from_utf8(output.stdout)
        .unwrap()
        .lines()
        .map(|line| {
            let (key, value) = line.split_once(' ').unwrap();
            (key.to_owned(), value.parse().unwrap())
        })
        .collect();
    assert_eq!(found, expected);
}

/// Any file can be mapped as a region is: the node's own answers are for the end-to-end cases.
#[test]
fn a_mapping_is_aligned_and_leaves_nothing_behind() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("region");
    let bytes: Vec<u8> = (0..4u64 << 20).map(|index| (index >> 12) as u8).collect();
    std::fs::write(&path, &bytes).unwrap();
    let node = Node::open_at(&path).unwrap();
    let region = abi::Region {
        size: bytes.len() as u64,
        ..Default::default()
    };
    let count = || std::fs::read_to_string("/proc/self/maps").unwrap();
    for (offset, len) in [
        (0, 4 << 20),
        (4096, 8192),
        ((2 << 20) + 4096, 4096),
        (0, 4096),
    ] {
        let mapping = RegionMapping::new(&node, &region, offset, len).unwrap();
        mapping.populate();
        assert_eq!(mapping.len(), len);
        assert_eq!(mapping.as_ptr() as u64 % (2 << 20), offset % (2 << 20));
        // SAFETY: the mapping is `len` bytes of memory that nobody writes.
        let seen = unsafe { std::slice::from_raw_parts(mapping.as_ptr(), len) };
        let start = offset as usize;
        assert!(seen == &bytes[start..start + len]);
        drop(mapping);
        assert!(!count().contains(path.to_str().unwrap()), "{}", count());
    }
    // The node is no character device here, so it has none of the calls.
    assert_eq!(node.info().unwrap_err().raw_os_error(), Some(libc::ENOTTY));
    assert!(RegionMapping::new(&node, &region, 0, usize::MAX).is_err());
    assert!(RegionMapping::new(&node, &region, 1, 4096).is_err());
}
