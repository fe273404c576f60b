//! Random calls, most of them nearly right. What they return does not matter; the kernel's opinion of
//! them is on its console.

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd};

use anyhow::{Result, ensure};
use ublk_vram::kmod::{Node, abi};

use super::{Place, life, nvidia, pread, pwrite, raw_ioctl};

/// xorshift64*: the same seed, the same calls.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    fn below(&mut self, limit: u64) -> u64 {
        (self.next() >> 8) % limit
    }

    fn one_in(&mut self, chance: u64) -> bool {
        self.below(chance) == 0
    }

    fn of<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len() as u64) as usize]
    }
}

const SIZES: [u64; 9] = [16, 32, 32, 8, 0, 8, 16, 72, 24];
const DIRECTIONS: [u64; 9] = [2, 3, 3, 1, 0, 1, 3, 3, 3];

struct Fuzz {
    random: Random,
    bar: Place,
    nodes: Vec<Node>,
    mappings: Vec<(*mut u8, usize)>,
    /// Where the kernel may write whatever it is made to.
    scratch: Vec<u8>,
    ids: Vec<u32>,
    good: u64,
}

pub fn run(bar: Place, calls: u64, seed: u64) -> Result<()> {
    let mut fuzz = Fuzz {
        random: Random(seed | 1),
        bar,
        nodes: vec![Node::open()?],
        mappings: Vec::new(),
        scratch: vec![0; 64 << 10],
        ids: Vec::new(),
        good: 0,
    };
    for _ in 0..calls {
        fuzz.step()?;
    }
    fuzz.mappings.drain(..).for_each(unmap);
    fuzz.nodes.clear();
    let node = Node::open()?;
    for region in node.list()? {
        let _ = node.destroy(region.id);
    }
    ensure!(
        fuzz.good > calls / 20,
        "only {} of {calls} calls did anything",
        fuzz.good
    );
    println!("{} of {calls}", fuzz.good);
    Ok(())
}

impl Fuzz {
    fn step(&mut self) -> Result<()> {
        match self.random.below(16) {
            0 if self.nodes.len() < 4 => self.nodes.push(Node::open()?),
            1 if self.nodes.len() > 1 => {
                let index = self.random.below(self.nodes.len() as u64) as usize;
                drop(self.nodes.swap_remove(index));
            }
            2 | 3 => self.map(),
            4 => self.touch(),
            5 => {
                if !self.mappings.is_empty() {
                    let index = self.random.below(self.mappings.len() as u64) as usize;
                    unmap(self.mappings.swap_remove(index));
                }
            }
            6 | 7 => self.transfer(),
            8 => self.open_otherwise(),
            _ => self.ioctl(),
        }
        Ok(())
    }

    fn node(&mut self) -> usize {
        self.random.below(self.nodes.len() as u64) as usize
    }

    fn id(&mut self) -> u32 {
        if self.ids.is_empty() || self.random.one_in(8) {
            return self.random.next() as u32 % 64;
        }
        let ids = std::mem::take(&mut self.ids);
        let id = self.random.of(&ids);
        self.ids = ids;
        id
    }

    fn structure(&mut self, number: u64) -> Vec<u8> {
        let pages = self.random.below(64) * 4096;
        let length = self.random.below(64) * 4096;
        let sticky = u32::from(self.random.one_in(4));
        let bytes = match number {
            1 => {
                let create = abi::CreateBar {
                    flags: sticky,
                    ..self.bar.part(pages, length)
                };
                [
                    create.flags.to_ne_bytes().to_vec(),
                    create.domain.to_ne_bytes().to_vec(),
                    vec![create.bus, create.devfn, create.bar, 0],
                    vec![0; 4],
                    create.offset.to_ne_bytes().to_vec(),
                    create.length.to_ne_bytes().to_vec(),
                ]
                .concat()
            }
            2 => {
                let flags = self.random.of(&[0u32, 0, 2, 3]);
                let address = nvidia::BASE + self.random.below(16) * 65536;
                let length = self.random.below(8) * 65536;
                [
                    flags.to_ne_bytes().to_vec(),
                    vec![0; 4],
                    address.to_ne_bytes().to_vec(),
                    length.to_ne_bytes().to_vec(),
                    vec![0; 8],
                ]
                .concat()
            }
            3 | 5 => {
                let flags = if number == 3 {
                    self.random.below(2) as u32
                } else {
                    0
                };
                [self.id().to_ne_bytes(), flags.to_ne_bytes()].concat()
            }
            6 => {
                let to = self.scratch.as_mut_ptr() as u64;
                let to = self.random.of(&[to, to, 0, 8, u64::MAX - 64, 1 << 63]);
                [
                    (self.random.below(8) as u32).to_ne_bytes().to_vec(),
                    (self.random.below(512) as u32).to_ne_bytes().to_vec(),
                    to.to_ne_bytes().to_vec(),
                ]
                .concat()
            }
            7 => [self.id().to_ne_bytes().to_vec(), vec![0; 68]].concat(),
            8 => {
                let address = self
                    .mappings
                    .last()
                    .map_or(self.random.next(), |m| m.0 as u64);
                [address.to_ne_bytes().to_vec(), vec![0; 16]].concat()
            }
            _ => vec![0; 16],
        };
        let mut out = vec![0; 512];
        out[..bytes.len()].copy_from_slice(&bytes);
        // One bit off, now and then; where a list goes to is left alone.
        if self.random.one_in(6) && number != 6 {
            let bit = self.random.below(8 * bytes.len() as u64);
            out[(bit / 8) as usize] ^= 1 << (bit % 8);
        }
        out
    }

    fn ioctl(&mut self) {
        let number = self
            .random
            .of(&[0, 1, 1, 2, 2, 3, 3, 3, 4, 5, 5, 6, 7, 8, 9]);
        let mut memory = self.structure(number);
        let known = (number as usize).min(8);
        let size = match self.random.below(12) {
            0 => self.random.below(512),
            _ => SIZES[known],
        };
        let direction = match self.random.below(12) {
            0 => self.random.below(4),
            _ => DIRECTIONS[known],
        };
        let command = direction << 30 | size << 16 | 0xf700 | number;
        let pointer = match self.random.below(40) {
            0 => std::ptr::null_mut(),
            1 => usize::MAX as *mut u8,
            2 => (1usize << 63) as *mut u8,
            _ => memory.as_mut_ptr(),
        };
        let node = self.node();
        if raw_ioctl(&self.nodes[node], command, pointer).is_err() {
            return;
        }
        self.good += 1;
        let at = match number {
            1 => 12,
            2 => 4,
            _ => return,
        };
        let id = memory
            .get(at..at + 4)
            .map_or([0; 4], |b| [b[0], b[1], b[2], b[3]]);
        self.ids.push(u32::from_ne_bytes(id));
        if self.ids.len() > 16 {
            self.ids.remove(0);
        }
    }

    fn map(&mut self) {
        if self.mappings.len() >= 8 {
            unmap(self.mappings.swap_remove(0));
        }
        let len = (self.random.below(1024) as usize + 1) * 4096;
        let offset = (u64::from(self.id()) << 40) | (self.random.below(64) * 4096);
        let protection = self.random.of(&[3, 3, 3, 1, 2, 0, 7]);
        let flags = self
            .random
            .of(&[libc::MAP_SHARED, libc::MAP_SHARED, libc::MAP_PRIVATE]);
        let node = self.node();
        // SAFETY: a new mapping at an address of the kernel's choice touches no existing memory.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                len,
                protection,
                flags,
                self.nodes[node].as_fd().as_raw_fd(),
                offset as i64,
            )
        };
        if base != libc::MAP_FAILED {
            self.good += 1;
            self.mappings.push((base.cast(), len));
        }
    }

    fn touch(&mut self) {
        let Some(&(base, len)) = self.mappings.last() else {
            return;
        };
        let offset = self.random.below(len as u64) as usize;
        // SAFETY: an mprotect or a partial unmap of our own mapping; a SIGBUS is handled.
        unsafe {
            if self.random.one_in(8) {
                libc::mprotect(base.cast(), 4096, libc::PROT_READ);
            }
            if self.random.one_in(8) {
                libc::mremap(base.cast(), len, len, libc::MREMAP_MAYMOVE);
            }
            libc::mprotect(base.cast(), len, libc::PROT_READ | libc::PROT_WRITE);
            life::sigbus_at(base.add(offset));
        }
    }

    fn transfer(&mut self) {
        let offset = self.random.below(300 << 10);
        let len = self.random.below(20_000) as usize;
        let mut memory = std::mem::take(&mut self.scratch);
        let node = self.node();
        let node = &self.nodes[node];
        let result = if self.random.one_in(2) {
            pread(node, &mut memory[..len], offset)
        } else {
            pwrite(node, &memory[..len], offset)
        };
        self.good += u64::from(result.is_ok_and(|bytes| bytes > 0));
        self.scratch = memory;
    }

    /// A file that may only be read, and one that is dropped at once.
    fn open_otherwise(&mut self) {
        if let Ok(file) = File::open(ublk_vram::kmod::NODE) {
            let number = self.random.below(9);
            let mut memory = self.structure(number);
            let command =
                DIRECTIONS[number as usize] << 30 | SIZES[number as usize] << 16 | 0xf700 | number;
            // SAFETY: the structure has room for what the kernel writes.
            unsafe { libc::ioctl(file.as_raw_fd(), command as _, memory.as_mut_ptr()) };
        }
    }
}

fn unmap((base, len): (*mut u8, usize)) {
    // SAFETY: a mapping of our own that nothing refers to.
    unsafe { libc::munmap(base.cast(), len) };
}
