//! `vramctl gpus`: what a device could be made of, and why the rest cannot.

use serde_json::{Value, json};
use ublk_vram::Result;
use ublk_vram::backend::pci::{self, Bar, PciFunction};
use ublk_vram::backend::vulkan::{self, Gpu};
use ublk_vram::size::human;

use crate::args::GpusArgs;
use crate::output;
use crate::table::{Align, Table};

/// Version of the JSON form.
const JSON_VERSION: u32 = 1;

pub fn run(args: &GpusArgs) -> Result<()> {
    let functions = pci::list()?;
    let gpus = vulkan::list();
    if args.json {
        return output::json(&document(&functions, &gpus));
    }
    output::data(&table(&functions).render(true))?;
    if functions.is_empty() {
        output::say("no PCI device of the display or memory class was found");
    }
    match &gpus {
        Ok(gpus) if gpus.is_empty() => output::say("Vulkan knows no GPU"),
        Ok(gpus) => {
            output::data("\nwith --backend vulkan:\n")?;
            output::data(&vulkan_table(gpus).render(true))?;
        }
        Err(error) => output::say(&format!("--backend vulkan cannot be used: {error}")),
    }
    Ok(())
}

/// The BAR that a device would be made of, else the one that comes nearest to it.
fn shown_bar(function: &PciFunction) -> Option<&Bar> {
    function.usable(None).ok().or_else(|| {
        let memory = function.bars.iter().filter(|bar| bar.is_memory);
        memory.max_by_key(|bar| (bar.prefetchable, bar.size))
    })
}

fn table(functions: &[PciFunction]) -> Table {
    let mut table = Table::new([
        ("INDEX", Align::Right),
        ("PCI", Align::Left),
        ("CLASS", Align::Left),
        ("VENDOR:DEVICE", Align::Left),
        ("DRIVER", Align::Left),
        ("BAR", Align::Right),
        ("SIZE", Align::Right),
        ("USABLE", Align::Left),
    ]);
    for (index, function) in functions.iter().enumerate() {
        let bar = shown_bar(function);
        table.row([
            index.to_string(),
            function.address.to_string(),
            class_name(function.class)
                .map_or_else(|| format!("{:06x}", function.class), str::to_owned),
            format!("{:04x}:{:04x}", function.vendor, function.device),
            function.driver.clone().unwrap_or_default(),
            bar.map_or_else(String::new, |bar| bar.index.to_string()),
            bar.map_or_else(String::new, |bar| human(bar.size)),
            match function.usable(None) {
                Ok(_) => "yes".to_owned(),
                Err(why) => format!("no: {why}"),
            },
        ]);
    }
    table
}

/// The GPUs that Vulkan knows, with indexes of their own.
fn vulkan_table(gpus: &[Gpu]) -> Table {
    let mut table = Table::new([
        ("INDEX", Align::Right),
        ("PCI", Align::Left),
        ("NAME", Align::Left),
        ("DRIVER", Align::Left),
        ("SIZE", Align::Right),
        ("FREE", Align::Right),
        ("MAPPABLE", Align::Right),
        ("RESIDENCY", Align::Left),
        ("DISPLAY", Align::Left),
        ("UUID", Align::Left),
        ("USABLE", Align::Left),
    ]);
    for (index, gpu) in gpus.iter().enumerate() {
        table.row([
            index.to_string(),
            gpu.address
                .map_or_else(String::new, |address| address.to_string()),
            gpu.name.clone(),
            format!("{} {}", gpu.driver, gpu.driver_version),
            human(gpu.device_local),
            gpu.free.map_or_else(String::new, human),
            human(gpu.host_visible),
            gpu.residency.to_string(),
            if gpu.display { "yes" } else { "no" }.to_owned(),
            gpu.gpu_uuid(),
            match gpu.usable(false) {
                Ok(()) => "yes".to_owned(),
                Err(why) => format!("no: {why}"),
            },
        ]);
    }
    table
}

/// Names of the classes that hold memory (include/linux/pci_ids.h, base class and subclass).
fn class_name(class: u32) -> Option<&'static str> {
    Some(match class >> 8 {
        0x0300 => "vga",
        0x0302 => "3d",
        0x0301 | 0x0380 => "display",
        0x0500 => "ram",
        0x0501 => "flash",
        0x0502 => "cxl",
        0x0580 => "memory",
        _ => return None,
    })
}

fn document(functions: &[PciFunction], gpus: &Result<Vec<Gpu>>) -> Value {
    let shown = functions.iter().enumerate().map(|(index, function)| {
        let (bar, reason) = match function.usable(None) {
            Ok(bar) => (Some(bar), None),
            Err(why) => (None, Some(why)),
        };
        let mut shown = json!(function);
        if let Some(fields) = shown.as_object_mut() {
            fields.insert("index".into(), json!(index));
            fields.insert("usable".into(), json!(bar.is_some()));
            fields.insert("usable_bar".into(), json!(bar.map(|bar| bar.index)));
            fields.insert("reason".into(), json!(reason.map(|why| why.message)));
        }
        shown
    });
    let (gpus, error) = match gpus {
        Ok(gpus) => (gpus.as_slice(), None),
        Err(error) => (&[][..], Some(&error.message)),
    };
    let vulkan = gpus.iter().enumerate().map(|(index, gpu)| {
        let reason = gpu.usable(false).err();
        let mut shown = json!(gpu);
        if let Some(fields) = shown.as_object_mut() {
            fields.insert("index".into(), json!(index));
            fields.insert("usable".into(), json!(reason.is_none()));
            fields.insert("reason".into(), json!(reason.map(|why| why.message)));
        }
        shown
    });
    json!({
        "version": JSON_VERSION,
        "gpus": shown.collect::<Vec<_>>(),
        "vulkan": vulkan.collect::<Vec<_>>(),
        "vulkan_error": error,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    /// A machine with one memory function nobody owns, and one GPU with a driver.
    fn machine() -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        let function = |address: &str, class: &str, vendor: &str, resource: &str| {
            let path = dir.path().join("sys/bus/pci/devices").join(address);
            std::fs::create_dir_all(&path).unwrap();
            std::fs::write(path.join("class"), format!("{class}\n")).unwrap();
            std::fs::write(path.join("vendor"), format!("{vendor}\n")).unwrap();
            std::fs::write(path.join("device"), "0x1110\n").unwrap();
            std::fs::write(path.join("resource"), resource).unwrap();
            path
        };
        let none = "0x0000000000000000 0x0000000000000000 0x0000000000000000\n";
        let memory = "0x0000000800000000 0x000000083fffffff 0x000000000014220c\n";
        function(
            "0000:00:04.0",
            "0x050000",
            "0x1af4",
            &format!("{none}{none}{memory}"),
        );
        let gpu = function("0000:03:00.0", "0x030000", "0x1002", memory);
        std::os::unix::fs::symlink("../../drivers/amdgpu", gpu.join("driver")).unwrap();
        dir
    }

    fn functions(root: &Path) -> Vec<PciFunction> {
        pci::list_at(root).unwrap()
    }

    #[test]
    fn the_table_says_why_not() {
        let machine = machine();
        let text = table(&functions(machine.path())).render(true);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(
            lines[0],
            "INDEX  PCI           CLASS  VENDOR:DEVICE  DRIVER  BAR  SIZE  USABLE"
        );
        assert_eq!(
            lines[1],
            "    0  0000:00:04.0  ram    1af4:1110      -         2    1G  yes"
        );
        assert!(lines[2].starts_with(
            "    1  0000:03:00.0  vga    1002:1110      amdgpu    0    1G  no: PCI function"
        ));
    }

    #[test]
    fn the_json_form() {
        let machine = machine();
        let json = document(
            &functions(machine.path()),
            &Err(ublk_vram::Error::usage("no Vulkan")),
        );
        assert_eq!(json["version"], 1);
        assert_eq!(json["gpus"][0]["usable"], true);
        assert_eq!(json["gpus"][0]["usable_bar"], 2);
        assert_eq!(json["gpus"][0]["bars"][0]["size"], 1 << 30);
        assert_eq!(json["vulkan"], json!([]));
        assert_eq!(json["vulkan_error"], "no Vulkan");
        assert_eq!(json["gpus"][1]["usable"], false);
        assert_eq!(json["gpus"][1]["driver"], "amdgpu");
        assert!(
            json["gpus"][1]["reason"]
                .as_str()
                .unwrap()
                .contains("amdgpu")
        );
    }
}
