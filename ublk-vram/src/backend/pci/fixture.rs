//! A root directory with a sysfs in it, for the tests.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::PathBuf;

use tempfile::TempDir;

use super::*;

pub(super) const MIB: u64 = 1 << 20;
/// Flags of a 64-bit prefetchable memory BAR, of a 32-bit one, of registers and of ports, as Linux
/// prints them.
pub(super) const MEM64: u64 = 0x14_220c;
pub(super) const MEM32: u64 = 0x4_2208;
pub(super) const REGISTERS: u64 = 0x4_0200;
pub(super) const PORTS: u64 = 0x4_0101;

/// A root directory with a sysfs in it.
pub(super) struct Root {
    dir: TempDir,
}

impl Root {
    pub(super) fn new() -> Root {
        let root = Root {
            dir: TempDir::new().unwrap(),
        };
        fs::create_dir_all(root.path("sys/bus/pci/devices")).unwrap();
        root
    }

    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub(super) fn write(&self, name: &str, text: impl AsRef<[u8]>) {
        let path = self.path(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    /// A function in `sys/devices`, with its link in `sys/bus/pci/devices`.
    pub(super) fn function(
        &self,
        address: &str,
        class: u32,
        vendor: u16,
        bars: &[(u8, u64, u64, u64)],
    ) -> Device<'_> {
        let dir = format!("sys/devices/pci0000:00/{address}");
        let mut lines = vec![(0, 0, 0); 13];
        for &(index, start, size, flags) in bars {
            lines[usize::from(index)] = (start, start + size - 1, flags);
            self.write(&format!("{dir}/resource{index}"), []);
            fs::File::options()
                .write(true)
                .open(self.path(&format!("{dir}/resource{index}")))
                .unwrap()
                .set_len(size)
                .unwrap();
            if flags & 0x2000 != 0 {
                let name = self.path(&format!("{dir}/resource{index}"));
                fs::hard_link(&name, self.path(&format!("{dir}/resource{index}_wc"))).unwrap();
            }
        }
        let text: String = lines
            .iter()
            .map(|(start, end, flags)| format!("0x{start:016x} 0x{end:016x} 0x{flags:016x}\n"))
            .collect();
        self.write(&format!("{dir}/resource"), text);
        self.write(&format!("{dir}/class"), format!("0x{class:06x}\n"));
        self.write(&format!("{dir}/vendor"), format!("0x{vendor:04x}\n"));
        self.write(&format!("{dir}/device"), "0x0100\n");
        self.write(&format!("{dir}/enable"), "0\n");
        self.write(&format!("{dir}/power/control"), "auto\n");
        self.write(&format!("{dir}/driver_override"), "(null)\n");
        let mut config = [0u8; 64];
        config[..2].copy_from_slice(&vendor.to_le_bytes());
        config[4] = 0x02;
        self.write(&format!("{dir}/config"), config);
        symlink(
            format!("../../../devices/pci0000:00/{address}"),
            self.path("sys/bus/pci/devices").join(address),
        )
        .unwrap();
        Device { root: self, dir }
    }

    pub(super) fn list(&self) -> Vec<PciFunction> {
        list_at(self.dir.path()).unwrap()
    }

    pub(super) fn claim(
        &self,
        address: &str,
        bar: Option<u8>,
        layout: &Layout,
    ) -> Result<PciMemory> {
        PciMemory::claim_at(self.dir.path(), &self.path("run"), address, bar, layout)
    }
}

pub(super) struct Device<'a> {
    root: &'a Root,
    pub(super) dir: String,
}

impl Device<'_> {
    pub(super) fn set(&self, attribute: &str, text: impl AsRef<[u8]>) -> &Self {
        self.root.write(&format!("{}/{attribute}", self.dir), text);
        self
    }

    pub(super) fn get(&self, attribute: &str) -> String {
        fs::read_to_string(self.root.path(&self.dir).join(attribute))
            .unwrap()
            .trim()
            .to_owned()
    }

    pub(super) fn bind(&self, driver: &str) -> &Self {
        let target = format!("../../../bus/pci/drivers/{driver}");
        symlink(target, self.root.path(&self.dir).join("driver")).unwrap();
        self
    }
}

/// A qxl as QEMU makes it: two small BARs, registers, ports, and the memory.
pub(super) fn qxl(root: &Root) -> Device<'_> {
    root.function(
        "0000:00:02.0",
        0x03_8000,
        0x1b36,
        &[
            (0, 0xf400_0000, 64 * MIB, MEM32),
            (1, 0xf800_0000, 16 * MIB, MEM32),
            (2, 0xfebf_0000, 8192, REGISTERS),
            (3, 0xc000, 32, PORTS),
            (4, 0x1_4000_0000, 64 * MIB, MEM64),
        ],
    )
}

pub(super) fn layout() -> Layout {
    Layout::new((9 * MIB) + 4096, Some(2 * MIB)).unwrap()
}

/// The reason why the only function of the tree is not usable.
pub(super) fn refusal(root: &Root, bar: Option<u8>) -> Error {
    let error = root.list()[0].usable(bar).unwrap_err();
    assert!(!error.message.contains('\n'), "one sentence: {error}");
    error
}
