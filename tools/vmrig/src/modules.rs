//! Finds kernel modules by name, in the order in which they must be loaded.
//!
//! The guest has neither kmod nor modules.dep: each module's own `.modinfo` section names what it
//! depends on. The modules are unpacked here, on the host, and the agent hands them to the kernel
//! one after the other.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, bail};

use crate::vmlinux::decompress;

/// The modules of one kernel.
#[derive(Debug)]
pub struct ModuleSet {
    root: PathBuf,
    loadable: BTreeMap<String, PathBuf>,
    builtin: BTreeSet<String>,
}

/// One loadable module.
#[derive(Debug)]
pub struct Module {
    /// Its name, with '_' for '-'.
    pub name: String,
    /// The uncompressed ELF object.
    pub data: Vec<u8>,
}

impl ModuleSet {
    /// Reads the names of a `/lib/modules/RELEASE` directory.
    ///
    /// # Errors
    /// When the directory cannot be read.
    pub fn open(root: &Path) -> Result<Self> {
        let mut loadable = BTreeMap::new();
        let mut pending = vec![root.to_owned()];
        while let Some(dir) = pending.pop() {
            let entries = fs::read_dir(&dir)
                .with_context(|| format!("cannot read the modules in {}", dir.display()))?;
            for entry in entries {
                let entry = entry?;
                if entry.file_type()?.is_dir() {
                    pending.push(entry.path());
                } else if let Some(name) = module_name(&entry.path()) {
                    loadable.insert(name, entry.path());
                }
            }
        }
        let builtin = fs::read_to_string(root.join("modules.builtin")).unwrap_or_default();
        let builtin = builtin
            .lines()
            .filter_map(|line| module_name(Path::new(line)))
            .collect();
        Ok(Self {
            root: root.to_owned(),
            loadable,
            builtin,
        })
    }

    /// Whether the kernel has the module, loadable or built in.
    pub fn contains(&self, name: &str) -> bool {
        let name = normal(name);
        self.loadable.contains_key(&name) || self.builtin.contains(&name)
    }

    /// The modules behind `names` and all they depend on, dependencies first; built-in ones are
    /// left out.
    ///
    /// # Errors
    /// When the kernel has no such module, or its file cannot be read.
    pub fn resolve<'a>(&self, names: impl IntoIterator<Item = &'a str>) -> Result<Vec<Module>> {
        let mut order = Vec::new();
        let mut seen = BTreeSet::new();
        for name in names {
            self.visit(&normal(name), None, &mut seen, &mut order)?;
        }
        Ok(order)
    }

    fn visit(
        &self,
        name: &str,
        needed_by: Option<&str>,
        seen: &mut BTreeSet<String>,
        order: &mut Vec<Module>,
    ) -> Result<()> {
        if !seen.insert(name.to_owned()) || self.builtin.contains(name) {
            return Ok(());
        }
        let Some(path) = self.loadable.get(name) else {
            let needed = needed_by
                .map(|by| format!(", needed by `{by}`"))
                .unwrap_or_default();
            bail!(
                "the kernel in {} has no module `{name}`{needed}",
                self.root.display()
            );
        };
        let data = read_module(path)?;
        let dependencies = modinfo(&data, "depends")
            .with_context(|| format!("cannot read the dependencies of {}", path.display()))?;
        for dependency in dependencies
            .split(',')
            .filter(|dependency| !dependency.is_empty())
        {
            self.visit(&normal(dependency), Some(name), seen, order)?;
        }
        order.push(Module {
            name: name.to_owned(),
            data,
        });
        Ok(())
    }
}

/// The kernel takes '-' and '_' in a module's name as equal.
fn normal(name: &str) -> String {
    name.replace('-', "_")
}

fn module_name(path: &Path) -> Option<String> {
    let file = path.file_name()?.to_str()?;
    let stem = [".ko", ".ko.xz", ".ko.zst", ".ko.gz"]
        .iter()
        .find_map(|end| file.strip_suffix(end));
    stem.map(normal)
}

fn read_module(path: &Path) -> Result<Vec<u8>> {
    let data = fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
    let program = match path.extension().and_then(|extension| extension.to_str()) {
        Some("xz") => "xz",
        Some("zst") => "zstd",
        Some("gz") => "gzip",
        _ => return Ok(data),
    };
    decompress(program, &data)
}

/// The value of one key in the `.modinfo` section of a 64-bit ELF object; empty if it has no such
/// key.
fn modinfo(object: &[u8], key: &str) -> Result<String> {
    let section = elf_section(object, b".modinfo").context("not an ELF object with .modinfo")?;
    let prefix = format!("{key}=");
    let value = section
        .split(|byte| *byte == 0)
        .find_map(|entry| entry.strip_prefix(prefix.as_bytes()))
        .unwrap_or_default();
    Ok(String::from_utf8_lossy(value).into_owned())
}

fn elf_section<'a>(object: &'a [u8], wanted: &[u8]) -> Option<&'a [u8]> {
    if !object.starts_with(b"\x7fELF\x02\x01") {
        return None;
    }
    let number = |offset: usize, length: usize| -> Option<usize> {
        let bytes = object.get(offset..offset.checked_add(length)?)?;
        let value = bytes
            .iter()
            .rev()
            .fold(0_u64, |value, byte| value << 8 | u64::from(*byte));
        usize::try_from(value).ok()
    };
    let (table, entry_size) = (number(0x28, 8)?, number(0x3a, 2)?);
    let (count, names_index) = (number(0x3c, 2)?, number(0x3e, 2)?);
    let section = |index: usize| -> Option<(usize, &'a [u8])> {
        let header = table.checked_add(index.checked_mul(entry_size)?)?;
        let (start, length) = (number(header + 0x18, 8)?, number(header + 0x20, 8)?);
        Some((
            number(header, 4)?,
            object.get(start..start.checked_add(length)?)?,
        ))
    };
    let (_, names) = section(names_index)?;
    (0..count).filter_map(section).find_map(|(name, data)| {
        let name = names.get(name..)?.split(|byte| *byte == 0).next()?;
        (name == wanted).then_some(data)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An ELF object of three sections: none, .shstrtab, .modinfo.
    fn object(modinfo: &[u8]) -> Vec<u8> {
        let names = b"\0.shstrtab\0.modinfo\0";
        let (names_at, info_at) = (64, 64 + names.len());
        let table = info_at + modinfo.len();
        let mut elf = vec![0; 64];
        elf[..6].copy_from_slice(b"\x7fELF\x02\x01");
        elf[0x28..0x30].copy_from_slice(&(table as u64).to_le_bytes());
        elf[0x3a..0x3c].copy_from_slice(&64_u16.to_le_bytes());
        elf[0x3c..0x3e].copy_from_slice(&3_u16.to_le_bytes());
        elf[0x3e..0x40].copy_from_slice(&1_u16.to_le_bytes());
        elf.extend_from_slice(names);
        elf.extend_from_slice(modinfo);
        for (name, at, length) in [
            (0, 0, 0),
            (1, names_at, names.len()),
            (11, info_at, modinfo.len()),
        ] {
            let mut header = [0; 64];
            header[..4].copy_from_slice(&(name as u32).to_le_bytes());
            header[0x18..0x20].copy_from_slice(&(at as u64).to_le_bytes());
            header[0x20..0x28].copy_from_slice(&(length as u64).to_le_bytes());
            elf.extend_from_slice(&header);
        }
        elf
    }

    fn set(modules: &[(&str, &str)]) -> (tempfile::TempDir, ModuleSet) {
        let dir = tempfile::tempdir().unwrap();
        let kernel = dir.path().join("kernel/drivers");
        fs::create_dir_all(&kernel).unwrap();
        for (file, depends) in modules {
            let info = format!("license=GPL\0depends={depends}\0name=x\0");
            fs::write(kernel.join(file), object(info.as_bytes())).unwrap();
        }
        fs::write(
            dir.path().join("modules.builtin"),
            "kernel/fs/ext4/ext4.ko\n",
        )
        .unwrap();
        let set = ModuleSet::open(dir.path()).unwrap();
        (dir, set)
    }

    #[test]
    fn dependencies_come_first_and_once() {
        let (_dir, set) = set(&[
            ("dm-mod.ko", ""),
            ("dm-bufio.ko", "dm-mod"),
            ("dm-cache.ko", "dm_bufio,dm-mod,ext4"),
        ]);
        let order = set.resolve(["dm-cache", "ext4", "dm_mod"]).unwrap();
        let names: Vec<&str> = order.iter().map(|module| module.name.as_str()).collect();
        assert_eq!(names, ["dm_mod", "dm_bufio", "dm_cache"]);
    }

    #[test]
    fn a_missing_module_is_named() {
        let (_dir, set) = set(&[("a.ko", "b")]);
        let error = set.resolve(["a"]).unwrap_err().to_string();
        assert!(error.contains("no module `b`, needed by `a`"), "{error}");
    }

    #[test]
    fn truncated_objects_are_errors() {
        let whole = object(b"depends=a\0");
        assert_eq!(modinfo(&whole, "depends").unwrap(), "a");
        assert_eq!(modinfo(&whole, "alias").unwrap(), "");
        for length in 0..whole.len() - 64 {
            assert!(modinfo(&whole[..length], "depends").is_err());
        }
    }
}
