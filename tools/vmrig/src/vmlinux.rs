//! Takes the uncompressed kernel out of a bzImage.
//!
//! QEMU starts an ELF kernel at its PVH entry point, which saves the seconds that the real-mode
//! stub and the decompressor cost under emulation. The payload's place is in the boot header, but
//! the header lies in some builds, so the magic numbers decide; only an ELF file is accepted.

use std::{
    fs::File,
    io::{Seek, SeekFrom, Write},
    process::{Command, Stdio},
};

use anyhow::{Context, Result, bail};

const ELF: &[u8] = b"\x7fELF";

/// A compression of the kernel build, how to recognise it and how to undo it.
struct Format {
    magic: &'static [u8],
    program: &'static str,
}

const FORMATS: [Format; 4] = [
    Format {
        magic: &[0x28, 0xb5, 0x2f, 0xfd],
        program: "zstd",
    },
    Format {
        magic: &[0x02, 0x21, 0x4c, 0x18],
        program: "lz4",
    },
    Format {
        magic: &[0xfd, b'7', b'z', b'X', b'Z', 0],
        program: "xz",
    },
    Format {
        magic: &[0x1f, 0x8b, 0x08],
        program: "gzip",
    },
];

/// Returns the ELF kernel in `image`, which may be one already.
pub(crate) fn extract(image: &[u8]) -> Result<Vec<u8>> {
    if image.starts_with(ELF) {
        return Ok(image.to_vec());
    }
    for format in &FORMATS {
        let starts = image
            .windows(format.magic.len())
            .enumerate()
            .filter(|(_, window)| *window == format.magic)
            .map(|(offset, _)| offset);
        for offset in starts {
            let payload = decompress(format.program, image.get(offset..).unwrap_or_default())?;
            if payload.starts_with(ELF) {
                return Ok(payload);
            }
        }
    }
    bail!("no zstd, lz4, xz or gzip payload in it is an ELF file: is it a bzImage?")
}

/// Decompresses with an external program whatever can be; bytes after the end are no error.
pub(crate) fn decompress(program: &str, data: &[u8]) -> Result<Vec<u8>> {
    let mut input: File = tempfile::tempfile().context("cannot make a temporary file")?;
    input.write_all(data)?;
    input.seek(SeekFrom::Start(0))?;
    let output = Command::new(program)
        .arg("-dc")
        .stdin(Stdio::from(input))
        .stderr(Stdio::null())
        .output()
        .with_context(|| format!("cannot run {program}, needed to decompress the kernel"))?;
    Ok(output.stdout)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_elf_file_is_taken_as_it_is() {
        assert_eq!(extract(b"\x7fELF rest").unwrap(), b"\x7fELF rest");
    }

    #[test]
    fn text_is_refused() {
        assert!(
            extract(b"not a kernel")
                .unwrap_err()
                .to_string()
                .contains("bzImage")
        );
    }
}
