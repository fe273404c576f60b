//! Discovery and claims on trees of files that look like sysfs.

use std::fs;
use std::os::unix::fs::symlink;

use super::fixture::{MEM64, MIB, Root, layout, qxl, refusal};
use super::*;
use crate::backend::conformance::check_backend;

#[test]
fn only_display_and_memory_in_the_order_of_the_bus() {
    let root = Root::new();
    root.function(
        "0000:03:00.0",
        0x03_0000,
        0x1002,
        &[(0, 0x40_0000_0000, 256 * MIB, MEM64)],
    )
    .set("boot_vga", "1\n");
    root.function(
        "0000:01:00.0",
        0x02_0000,
        0x8086,
        &[(0, 0xf000_0000, MIB, MEM64)],
    );
    root.function(
        "0000:00:03.0",
        0x05_0000,
        0x1af4,
        &[(2, 0x8000_0000, 64 * MIB, MEM64)],
    );
    root.write("sys/bus/pci/devices/not-an-address/class", "0x030000\n");
    let found: Vec<String> = root
        .list()
        .iter()
        .map(|function| function.address.to_string())
        .collect();
    assert_eq!(found, ["0000:00:03.0", "0000:03:00.0"]);
    assert!(root.list()[1].boot_vga);
    assert!(
        list_at(&root.path("nothing")).unwrap().is_empty(),
        "a machine without PCI"
    );
}

#[test]
fn a_function_is_read_whole() {
    let root = Root::new();
    qxl(&root).set("resource4_resize", "0000000000000ff0\n");
    let function = &root.list()[0];
    assert_eq!(
        (function.class, function.vendor, function.device),
        (0x03_8000, 0x1b36, 0x100)
    );
    assert_eq!(function.bars.len(), 5);
    let bar = function.usable(None).unwrap();
    assert_eq!(
        (bar.index, bar.start, bar.size),
        (4, 0x1_4000_0000, 64 * MIB),
        "64-bit before 32-bit"
    );
    assert!(bar.prefetchable && bar.is_memory && bar.is_64bit && bar.has_wc);
    assert_eq!(bar.resizable_to, Some(2048 * MIB));
    assert_eq!(function.usable(Some(1)).unwrap().size, 16 * MIB);
    let ports = &function.bars[3];
    assert!(!ports.is_memory && !ports.prefetchable && !ports.has_wc);
    let json = serde_json::to_value(function).unwrap();
    assert_eq!(json["address"], "0000:00:02.0");
    assert_eq!(json["bars"][4]["size"], 64 * MIB);
}

#[test]
fn seven_lines_and_broken_files() {
    let root = Root::new();
    let device = qxl(&root);
    let text = device.get("resource");
    let seven: Vec<&str> = text.lines().take(7).collect();
    device.set("resource", seven.join("\n"));
    assert_eq!(root.list()[0].bars.len(), 5);
    for broken in [
        "",
        "\n",
        "0x0 0x1",
        "x y z",
        "0x2 0x1 0x200",
        "0x0 0xffffffffffffffff 0x200",
    ] {
        device.set("resource", broken);
        assert!(root.list()[0].bars.is_empty(), "{broken:?}");
    }
    device.set("class", "no number\n");
    assert!(root.list().is_empty());
}

#[test]
fn a_driver_is_named_with_the_way_to_unbind_it() {
    let root = Root::new();
    qxl(&root).bind("amdgpu");
    let error = refusal(&root, None);
    assert_eq!(error.kind, ErrorKind::Busy);
    assert!(error.message.contains("amdgpu"));
    assert!(
        error
            .message
            .contains("echo 0000:00:02.0 > /sys/bus/pci/drivers/amdgpu/unbind"),
        "{error}"
    );
}

#[test]
fn bars_that_are_no_memory() {
    let root = Root::new();
    qxl(&root);
    for (bar, kind, says) in [
        (2, ErrorKind::Unsupported, "not prefetchable"),
        (3, ErrorKind::Unsupported, "I/O ports"),
        (5, ErrorKind::NotFound, "upper half of the 64-bit BAR 4"),
        (6, ErrorKind::Usage, "0 to 5"),
        (255, ErrorKind::Usage, "0 to 5"),
    ] {
        let error = refusal(&root, Some(bar));
        assert_eq!(error.kind, kind);
        assert!(error.message.contains(says), "{error}");
    }
    let root = Root::new();
    let device = root.function(
        "0000:00:02.0",
        0x03_8000,
        0x1b36,
        &[(0, 0, 256 * MIB, MEM64 | 0x2000_0000)],
    );
    for bar in [None, Some(0)] {
        assert!(refusal(&root, bar).message.contains("was given no place"));
    }
    device.set(
        "resource",
        "0x00000000febf0000 0x00000000febf1fff 0x0000000000040200\n",
    );
    assert!(
        refusal(&root, None)
            .message
            .contains("none of its BARs is prefetchable memory")
    );
    assert!(refusal(&root, Some(1)).message.contains("not implemented"));
}

#[test]
fn hardware_that_cannot() {
    let root = Root::new();
    root.function(
        "0000:01:00.0",
        0x03_0200,
        0x10de,
        &[(1, 0x40_0000_0000, 256 * MIB, MEM64)],
    )
    .bind("nvidia");
    assert_eq!(refusal(&root, None).kind, ErrorKind::Unsupported);
    let root = Root::new();
    root.function(
        "0000:00:02.0",
        0x03_0000,
        0x8086,
        &[(2, 0x40_0000_0000, 256 * MIB, MEM64)],
    );
    assert!(
        refusal(&root, None)
            .message
            .contains("no memory of its own")
    );
    // Claims and sizes do not go by the list, which leaves other classes out.
    root.function(
        "0000:00:09.0",
        0x02_0000,
        0x8086,
        &[(0, 0x50_0000_0000, 256 * MIB, MEM64)],
    );
    let error = root.claim("00:09.0", None, &layout()).unwrap_err();
    assert!(error.message.contains("class 020000"), "{error}");
}

#[test]
fn a_console_on_the_card() {
    // sysfb's platform device below the function, with a framebuffer.
    let root = Root::new();
    let device = qxl(&root);
    device.set("efi-framebuffer.0/uevent", "");
    assert!(refusal(&root, None).message.contains("efi-framebuffer.0"));
    root.write("sys/class/graphics/fb0/name", "EFI VGA\n");
    let target = "../../../devices/pci0000:00/0000:00:02.0/efi-framebuffer.0";
    symlink(target, root.path("sys/class/graphics/fb0/device")).unwrap();
    let error = refusal(&root, None);
    assert_eq!(error.kind, ErrorKind::Busy);
    assert!(error.message.contains("fb0 (EFI VGA)"), "{error}");

    // One that hangs below no function: it belongs to the primary adapter.
    let root = Root::new();
    let device = qxl(&root);
    root.write("sys/devices/platform/simple-framebuffer.0/uevent", "");
    root.write("sys/class/graphics/fb0/name", "simple\n");
    let target = "../../../devices/platform/simple-framebuffer.0";
    symlink(target, root.path("sys/class/graphics/fb0/device")).unwrap();
    assert!(root.list()[0].usable(None).is_ok());
    device.set("boot_vga", "1\n");
    assert!(refusal(&root, None).message.contains("fb0 (simple)"));
}

#[test]
fn the_vga_text_console_writes_into_the_primary_adapter() {
    let root = Root::new();
    let device = qxl(&root);
    device.set("boot_vga", "1\n");
    root.write("sys/class/vtconsole/vtcon0/name", "(S) dummy device\n");
    root.write("sys/class/vtconsole/vtcon0/bind", "1\n");
    assert!(root.list()[0].usable(None).is_ok());
    root.write("sys/class/vtconsole/vtcon0/name", "(S) VGA+\n");
    assert!(
        refusal(&root, None)
            .message
            .contains("VGA text console (vtcon0)")
    );
    root.write("sys/class/vtconsole/vtcon0/bind", "0\n");
    assert!(root.list()[0].usable(None).is_ok());
    root.write("sys/class/vtconsole/vtcon0/bind", "1\n");
    device.set("boot_vga", "0\n");
    assert!(root.list()[0].usable(None).is_ok());
}

#[test]
fn a_claim_in_iomem() {
    let root = Root::new();
    qxl(&root);
    let line = "140000000-143ffffff : 0000:00:02.0\n";
    let plain =
        format!("00000000-00000fff : Reserved\n140000000-143ffffff : PCI Bus 0000:00\n  {line}");
    for (iomem, who) in [
        (plain.clone(), None),
        (
            format!("{plain}    140000000-1407fffff : BOOTFB\n"),
            Some("BOOTFB"),
        ),
        (
            format!("{plain}    140000000-143ffffff : qxl mem\n"),
            Some("qxl mem"),
        ),
        (
            format!(
                "{plain}  150000000-150ffffff : 0000:00:05.0\n    150000000-150ffffff : other\n"
            ),
            None,
        ),
        // A framebuffer that stands around the BAR's line.
        (
            format!("140000000-143ffffff : efifb\n  {line}"),
            Some("efifb"),
        ),
        // Without root there are no addresses.
        (
            "00000000-00000000 : 0000:00:02.0\n  00000000-00000000 : BOOTFB\n".to_owned(),
            None,
        ),
        ("garbage\n-\n : \nx-y : z\n".to_owned(), None),
    ] {
        root.write("proc/iomem", &iomem);
        match who {
            None => assert!(root.list()[0].usable(None).is_ok(), "{iomem}"),
            Some(who) => {
                let error = refusal(&root, None);
                assert_eq!(error.kind, ErrorKind::Busy);
                assert!(error.message.contains(who), "{error}");
            }
        }
    }
}

#[test]
fn lockdown() {
    let root = Root::new();
    qxl(&root);
    root.write(
        "sys/kernel/security/lockdown",
        "[none] integrity confidentiality\n",
    );
    assert!(root.list()[0].usable(None).is_ok());
    for mode in ["integrity", "confidentiality"] {
        let text = "none integrity confidentiality\n".replace(mode, &format!("[{mode}]"));
        root.write("sys/kernel/security/lockdown", text);
        let error = refusal(&root, None);
        assert_eq!(error.kind, ErrorKind::Permission);
        assert!(error.message.contains(mode), "{error}");
    }
}

#[test]
fn a_claim_sets_the_function_up_and_back() {
    let root = Root::new();
    let device = qxl(&root);
    let memory = root.claim("00:02.0", None, &layout()).unwrap();
    assert_eq!(
        (device.get("enable"), device.get("power/control")),
        ("1".into(), "on".into())
    );
    assert_eq!(device.get("driver_override"), "ublk-vram");
    assert!(memory.present() && memory.is_write_combined());
    assert_eq!(memory.bar().index, 4);
    let lock = root.path("run/pci-0000:00:02.0-4.lock");
    assert_eq!(
        fs::read_to_string(&lock).unwrap().trim(),
        std::process::id().to_string()
    );
    let error = root.claim("0000:00:02.0", Some(4), &layout()).unwrap_err();
    assert_eq!(error.kind, ErrorKind::Busy);
    assert!(
        error
            .message
            .contains(&format!("process {}", std::process::id())),
        "{error}"
    );
    memory.release().unwrap();
    assert_eq!(
        (device.get("enable"), device.get("power/control")),
        ("0".into(), "auto".into())
    );
    assert_eq!(device.get("driver_override"), "");
    assert!(!lock.exists(), "nothing is left behind");
    drop(root.claim("00:02.0", None, &layout()).unwrap());
    assert_eq!(
        (device.get("enable"), device.get("power/control")),
        ("0".into(), "auto".into())
    );
}

#[test]
fn what_was_set_already_is_left_alone() {
    let root = Root::new();
    let device = qxl(&root);
    device.set("enable", "2\n").set("power/control", "on\n");
    // A server that was killed left its override and its lock file.
    device.set("driver_override", "ublk-vram\n");
    root.write("run/pci-0000:00:02.0-4.lock", "999999\n");
    let memory = root.claim("00:02.0", None, &layout()).unwrap();
    assert_eq!(
        (device.get("enable"), device.get("power/control")),
        ("2".into(), "on".into())
    );
    memory.release().unwrap();
    assert_eq!(
        (device.get("enable"), device.get("power/control")),
        ("2".into(), "on".into())
    );
    assert_eq!(device.get("driver_override"), "");
    device.set("driver_override", "vfio-pci\n");
    drop(root.claim("00:02.0", None, &layout()).unwrap());
    assert_eq!(device.get("driver_override"), "vfio-pci");
}

#[test]
fn the_function_stays_awake_for_its_other_bar() {
    let root = Root::new();
    let device = qxl(&root);
    let first = root.claim("00:02.0", Some(4), &layout()).unwrap();
    let second = root.claim("00:02.0", Some(1), &layout()).unwrap();
    first.release().unwrap();
    assert_eq!(
        (device.get("enable"), device.get("power/control")),
        ("1".into(), "on".into())
    );
    assert_eq!(device.get("driver_override"), "ublk-vram");
    assert!(second.open(&layout()).is_ok());
    drop(second);
    assert_eq!(device.get("driver_override"), "");
}

#[test]
fn claims_that_fail_leave_nothing_behind() {
    let root = Root::new();
    let device = qxl(&root);
    for (address, bar, kind, says) in [
        ("nonsense", None, ErrorKind::Usage, "not a PCI address"),
        (
            "00:03.0",
            None,
            ErrorKind::NotFound,
            "no PCI function 0000:00:03.0",
        ),
        (
            "00:02.0",
            Some(2),
            ErrorKind::Unsupported,
            "not prefetchable",
        ),
    ] {
        let error = root.claim(address, bar, &layout()).unwrap_err();
        assert_eq!(error.kind, kind);
        assert!(error.message.contains(says), "{error}");
    }
    let large = Layout::new(64 * MIB, None).unwrap();
    device.set("resource4_resize", "00000000000001c0\n");
    let error = root.claim("00:02.0", None, &large).unwrap_err();
    assert_eq!(error.kind, ErrorKind::NoSpace);
    let fits = Layout::largest_device(64 * MIB, Some(large.chunk_size()));
    for says in [
        format!("needs {} bytes", large.total_bytes()),
        format!("has {} (64M)", 64 * MIB),
        format!("largest device that fits is {fits} bytes"),
        "echo 8 > /sys/bus/pci/devices/0000:00:02.0/resource4_resize".to_owned(),
    ] {
        assert!(error.message.contains(&says), "{error}");
    }
    assert!(
        Layout::new(fits, Some(large.chunk_size()))
            .unwrap()
            .total_bytes()
            <= 64 * MIB
    );

    // Memory decoding stays off.
    let mut config = fs::read(root.path(&device.dir).join("config")).unwrap();
    config[4] = 0;
    device.set("config", &config);
    let error = root.claim("00:02.0", None, &layout()).unwrap_err();
    assert!(error.message.contains("does not decode"), "{error}");
    assert_eq!(device.get("enable"), "0");
    assert_eq!(device.get("driver_override"), "");
    assert_eq!(fs::read_dir(root.path("run")).unwrap().count(), 0);
}

#[test]
fn a_function_that_is_gone() {
    let root = Root::new();
    let device = qxl(&root);
    let memory = root.claim("00:02.0", None, &layout()).unwrap();
    device.set("config", [0xff; 64]);
    assert!(!memory.present());
    let error = memory.open(&layout()).err().unwrap();
    assert!(error.message.contains("gone from the bus"), "{error}");
    fs::remove_dir_all(root.path(&device.dir)).unwrap();
    assert!(!memory.present());
    assert!(memory.release().is_ok(), "nothing is there to set back");
}

#[test]
fn the_backend_passes_the_suite_and_the_memory_outlives_it() {
    let root = Root::new();
    let device = qxl(&root);
    let layout = layout();
    let memory = root.claim("00:02.0", None, &layout).unwrap();
    let backend = memory.open(&layout).unwrap();
    assert_eq!(
        (backend.kind(), backend.gpu().as_deref()),
        ("pci", Some("0000:00:02.0"))
    );
    assert!(
        backend.copy_path().ends_with(", write-combined"),
        "{}",
        backend.copy_path()
    );
    check_backend(&backend, &layout).into_result().unwrap();
    let last = backend.chunks().last().unwrap().clone();
    drop(backend);
    let at = last.at(last.size - 8, 8).unwrap();
    // SAFETY: the clone of the chunk keeps the mapping.
    unsafe { at.cast::<u64>().write_volatile(0x1122_3344_5566_7788) };
    drop(last);
    let again = memory.open(&layout).unwrap();
    let last = again.chunks().last().unwrap();
    let at = last.at(last.size - 8, 8).unwrap();
    // SAFETY: mapped for as long as `again` lives.
    let word = unsafe { at.cast::<u64>().read_volatile() };
    assert_eq!(word, 0x1122_3344_5566_7788);
    drop(again);
    drop(memory);
    // The probe of a new claim puts back what it finds.
    let before = fs::read(root.path(&device.dir).join("resource4")).unwrap();
    drop(root.claim("00:02.0", None, &layout).unwrap());
    assert!(before == fs::read(root.path(&device.dir).join("resource4")).unwrap());
}

#[test]
fn a_bar_without_write_combining_is_used_with_a_warning() {
    let root = Root::new();
    let device = qxl(&root);
    fs::remove_file(root.path(&device.dir).join("resource4_wc")).unwrap();
    assert!(!root.list()[0].usable(None).unwrap().has_wc);
    let memory = root.claim("00:02.0", None, &layout()).unwrap();
    assert!(
        memory
            .open(&layout())
            .unwrap()
            .copy_path()
            .ends_with("uncached: slow")
    );
}

#[test]
fn memory_that_is_not_there() {
    // A file that is too short stands for an aperture that cannot be mapped or reads from nowhere; the
    // kernel's own refusals are told in words.
    let root = Root::new();
    let device = qxl(&root);
    let path = root.path(&device.dir).join("resource4_wc");
    fs::remove_file(&path).unwrap();
    symlink("/dev/full", &path).unwrap();
    let error = root.claim("00:02.0", None, &layout()).unwrap_err();
    assert!(
        error.message.contains("BAR 4 of PCI function 0000:00:02.0"),
        "{error}"
    );
    assert_eq!(device.get("driver_override"), "");
}

#[test]
fn this_machine() {
    for function in list().unwrap() {
        println!(
            "{} {:06x} {:?}",
            function.address,
            function.class,
            function.usable(None)
        );
    }
    assert_eq!(
        available("ffff:ff:1f.7", None).unwrap_err().kind,
        ErrorKind::NotFound
    );
    assert_eq!(available("", None).unwrap_err().kind, ErrorKind::Usage);
}
