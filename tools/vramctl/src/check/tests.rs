use super::*;
use nix::errno::Errno;

fn machine(is_root: bool) -> (tempfile::TempDir, Machine) {
    let dir = tempfile::tempdir().unwrap();
    let root = Root::at(dir.path());
    (
        dir,
        Machine {
            root,
            release: "6.12.48-test".into(),
            is_root,
        },
    )
}

fn file(dir: &tempfile::TempDir, path: &str, text: &str) {
    let path = dir.path().join(path.trim_start_matches('/'));
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    std::fs::write(path, text).unwrap();
}

#[test]
fn lines_and_what_to_do() {
    let items = [
        Item::ok("kernel", "6.12.48"),
        Item::warn("gpu memory", "none", "see `vramctl gpus`"),
        Item::fail("ublk driver", "not loaded", "run `modprobe ublk_drv`"),
    ];
    assert_eq!(
        render(&items),
        "ok    kernel       6.12.48\n\
         warn  gpu memory   none\n      \
               -> see `vramctl gpus`\n\
         FAIL  ublk driver  not loaded\n      \
               -> run `modprobe ublk_drv`\n"
    );
    assert_eq!(
        json!(items[2]).to_string(),
        r#"{"detail":"not loaded","item":"ublk driver","status":"fail","todo":"run `modprobe ublk_drv`"}"#
    );
}

#[test]
fn kernels_with_trouble_are_a_warning() {
    assert_eq!(kernel::release("6.12.48").status, Status::Ok);
    assert_eq!(kernel::release("7.0.1").status, Status::Warn);
}

#[test]
fn the_driver_is_loaded_or_its_absence_explained() {
    let (dir, machine) = machine(true);
    let missing = kernel::driver(&machine);
    assert_eq!(missing.status, Status::Fail);
    file(
        &dir,
        "/boot/config-6.12.48-test",
        "CONFIG_BLK_DEV=y\n# CONFIG_BLK_DEV_UBLK is not set\n",
    );
    assert_eq!(
        kernel::config(&machine, "CONFIG_BLK_DEV_UBLK").unwrap(),
        "n"
    );
    assert_eq!(kernel::config(&machine, "CONFIG_BLK_DEV").unwrap(), "y");
    file(&dir, "/boot/config-6.12.48-test", "CONFIG_BLK_DEV_UBLK=m\n");
    assert_eq!(
        kernel::config(&machine, "CONFIG_BLK_DEV_UBLK").unwrap(),
        "m"
    );
    file(&dir, "/sys/module/ublk_drv/refcnt", "0\n");
    assert_eq!(kernel::driver(&machine), Item::ok("ublk driver", "loaded"));
}

#[test]
fn io_uring_by_trying_and_by_its_switch() {
    let (dir, root) = machine(true);
    assert_eq!(kernel::io_uring(&root, Errno::EFAULT).status, Status::Ok);
    assert_eq!(kernel::io_uring(&root, Errno::ENOSYS).status, Status::Fail);
    assert!(
        kernel::io_uring(&root, Errno::EPERM)
            .detail
            .contains("seccomp")
    );
    file(&dir, "/proc/sys/kernel/io_uring_disabled", "2\n");
    assert!(
        kernel::io_uring(&root, Errno::EPERM)
            .detail
            .contains("io_uring_disabled = 2")
    );
    file(&dir, "/proc/sys/kernel/io_uring_disabled", "1\n");
    let user = Machine {
        is_root: false,
        ..root
    };
    assert_eq!(kernel::io_uring(&user, Errno::EPERM).status, Status::Ok);
}

#[test]
fn lockdown_by_the_word_in_brackets() {
    let (dir, machine) = machine(true);
    assert_eq!(kernel::lockdown(&machine).status, Status::Ok);
    file(
        &dir,
        "/sys/kernel/security/lockdown",
        "[none] integrity confidentiality\n",
    );
    assert_eq!(kernel::lockdown(&machine), Item::ok("lockdown", "none"));
    file(
        &dir,
        "/sys/kernel/security/lockdown",
        "none [integrity] confidentiality\n",
    );
    let item = kernel::lockdown(&machine);
    assert_eq!(item.status, Status::Warn);
    assert!(item.detail.starts_with("integrity: "), "{item:?}");
}

#[test]
fn without_root_rights_are_a_warning_not_a_failure() {
    let (_dir, user) = machine(false);
    let missing = ["CAP_SYS_ADMIN (x)".to_owned()];
    assert_eq!(
        super::machine::privileges(&user, &missing).status,
        Status::Warn
    );
    let root = Machine {
        is_root: true,
        ..user
    };
    assert_eq!(
        super::machine::privileges(&root, &missing).status,
        Status::Fail
    );
    assert_eq!(super::machine::privileges(&root, &[]).status, Status::Ok);
}

#[test]
fn a_ghost_is_a_failure() {
    let (dir, machine) = machine(true);
    let head = "Filename Type Size Used Priority\n";
    file(
        &dir,
        "/proc/swaps",
        &format!("{head}/dev/sda2 partition 1024 4 -2\n"),
    );
    assert_eq!(super::machine::ghosts(&machine).status, Status::Ok);
    file(
        &dir,
        "/proc/swaps",
        &format!("{head}/dev/ublkb0\\040(deleted) partition 1024 4 100\n"),
    );
    let item = super::machine::ghosts(&machine);
    assert_eq!(item.status, Status::Fail);
    assert!(item.detail.contains("/dev/ublkb0 (4K in use)"), "{item:?}");
}

#[test]
fn cgroup_and_cost() {
    let (dir, machine) = machine(true);
    assert_eq!(super::machine::cgroup(&machine).status, Status::Warn);
    file(&dir, "/sys/fs/cgroup/cgroup.controllers", "cpu memory\n");
    assert_eq!(super::machine::cgroup(&machine).status, Status::Ok);
    assert!(
        super::machine::cost()
            .detail
            .starts_with("a device of 512M or more takes up to 48M")
    );
}

#[test]
fn compaction_by_its_switch() {
    let (dir, machine) = machine(true);
    for (text, status) in [("1\n", Status::Warn), ("0\n", Status::Ok)] {
        file(&dir, "/proc/sys/vm/compact_unevictable_allowed", text);
        assert_eq!(super::machine::compaction(&machine).status, status);
    }
}

#[test]
fn memory_that_the_driver_may_move_is_no_safe_swap() {
    use ublk_vram::backend::vulkan::{Gpu, GpuKind, Residency};
    let gpu = |residency| Gpu {
        name: "A Card".into(),
        address: "03:00.0".parse().ok(),
        uuid: String::new(),
        vendor: 0,
        device: 0,
        driver: String::new(),
        driver_version: String::new(),
        kind: GpuKind::Discrete,
        device_local: 8 << 30,
        free: None,
        host_visible: 8 << 30,
        host_visible_budget: 8 << 30,
        host_visible_free: 8 << 30,
        max_allocation: 4 << 30,
        max_allocations: 4096,
        exportable: true,
        engines: true,
        display: false,
        residency,
        reason: None,
    };
    let item = super::machine::gpu_memory(&gpu(Residency::Pinned));
    assert_eq!(item.status, Status::Ok);
    assert!(item.detail.ends_with("(pinned)"), "{item:?}");
    let item = super::machine::gpu_memory(&gpu(Residency::Evictable));
    assert_eq!(item.status, Status::Warn);
    assert!(item.detail.starts_with("0000:03:00.0 A Card"), "{item:?}");
}
