//! The session as the supervisor holds it.

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixListener;

use crate::backend::{Backend, Exported, MemoryDescription, MemoryHandles};
use crate::control::RunDir;
use crate::error::{Error, ErrorKind, Result};
use crate::safety;
use crate::session::{Begin, Identity, NameLock, Regions, Role, TagBoard, VERSION, View};
use crate::store::Layout;
use crate::store::shared::SharedMapping;

/// The heap that a takeover and a supervisor's messages use.
const HEAP_RESERVE: usize = 512 << 10;

/// Regions that every device has, and that this process maps for its own use.
const OWN_REGIONS: [&str; 5] = ["checksums", "io", "life", "state", "tags"];

/// Everything that must outlive a worker, mapped where it is memory of ours: the caller locks it.
pub(super) struct Kept {
    pub(super) identity: Identity,
    pub(super) layout: Layout,
    pub(super) run_dir: RunDir,
    /// Absent while the first worker has not made it yet.
    memory: Option<Held>,
    _storage: Option<Box<dyn Backend>>,
    pub(super) regions: Regions,
    /// Regions that workers made.
    mapped: Vec<SharedMapping>,
    tags: Option<TagBoard>,
    listener: UnixListener,
    /// The last field, so the last to be dropped: while it is held, nobody takes the name.
    name: NameLock,
}

/// Device memory.
enum Held {
    /// Made here, or by a supervisor before this one.
    Made(MemoryHandles),
    /// Made by a worker: this process can hold it, and needs no GPU library for that.
    HandedOver(MemoryDescription, Vec<OwnedFd>),
}

impl Kept {
    pub(super) fn new(
        identity: Identity,
        run_dir: RunDir,
        name: NameLock,
        listener: UnixListener,
        memory: Option<MemoryHandles>,
        regions: Regions,
    ) -> Result<Kept> {
        let layout = identity.layout()?;
        // Memory that is system memory is mapped, and so locked, here as well.
        let storage = match &memory {
            Some(memory @ MemoryHandles::Host(_)) => Some(memory.open(&layout)?),
            _ => None,
        };
        Ok(Kept {
            identity,
            layout,
            run_dir,
            memory: memory.map(Held::Made),
            _storage: storage,
            regions,
            mapped: Vec::new(),
            tags: None,
            listener,
            name,
        })
    }

    /// Maps every region there is and locks all memory of this process.
    pub(super) fn lock(&mut self) -> Result<View> {
        let shape = self.identity.shape;
        let arena = shape.arena_bytes();
        if arena > 0 {
            self.mapped.push(self.regions.map("io", arena)?);
        }
        self.tags = Some(TagBoard::map(&self.regions, shape)?);
        let storage = match &self.memory {
            Some(Held::Made(memory)) => memory.system_bytes(&self.layout),
            _ => 0,
        };
        let view = View::new(&self.regions, &self.identity, arena as u64, storage)?;
        // What a worker made, beside the regions that every device has.
        for (what, fd) in self.regions.copies()? {
            if !OWN_REGIONS.contains(&what.name.as_str()) {
                self.mapped
                    .push(SharedMapping::new(fd.as_fd(), what.bytes)?);
            }
        }
        let spec = &self.identity.spec;
        if !spec.lab.no_memory_lock {
            safety::pin_programs()?;
            match safety::lock_memory() {
                Err(error) if !spec.allow_unsafe => return Err(error),
                Err(error) => tracing::warn!("{error}"),
                Ok(()) => {}
            }
        }
        safety::reserve_heap(HEAP_RESERVE);
        safety::prefault_stack(HEAP_RESERVE);
        Ok(view)
    }

    pub(super) fn keep_region(
        &mut self,
        what: crate::session::Sized,
        fds: Vec<OwnedFd>,
    ) -> Result<()> {
        let fd = fds.into_iter().next();
        let fd = fd.ok_or_else(|| Error::new(ErrorKind::Io, "a region came without its memory"))?;
        self.mapped.push(self.regions.keep(what, fd)?);
        Ok(())
    }

    pub(super) fn keep_memory(&mut self, description: MemoryDescription, fds: Vec<OwnedFd>) {
        self.memory = Some(Held::HandedOver(description, fds));
    }

    fn export(&self) -> Result<Option<Exported>> {
        match &self.memory {
            None => Ok(None),
            Some(Held::Made(memory)) => memory.export().map(Some),
            Some(Held::HandedOver(description, fds)) => {
                let copies = fds.iter().map(OwnedFd::try_clone).collect::<Result<_, _>>();
                Ok(Some(Exported {
                    description: description.clone(),
                    fds: copies.map_err(|error| Error::os("dup of device memory", error))?,
                }))
            }
        }
    }

    /// A second descriptor of the control socket.
    pub(super) fn listener(&self) -> Result<UnixListener> {
        self.listener
            .try_clone()
            .map_err(|error| Error::os("dup of the control socket", error))
    }

    /// What another worker is told and given first.
    pub(super) fn begin(&self, role: Role) -> Result<(Begin, Vec<OwnedFd>)> {
        let copy = |fd: std::os::fd::BorrowedFd<'_>| {
            fd.try_clone_to_owned()
                .map_err(|error| Error::os("dup of a descriptor", error))
        };
        let mut fds = vec![copy(self.name.as_fd())?, copy(self.listener.as_fd())?];
        let regions = self.regions.copies()?;
        let (regions, region_fds): (Vec<_>, Vec<_>) = regions.into_iter().unzip();
        fds.extend(region_fds);
        let memory = self.export()?.map(|exported| {
            fds.extend(exported.fds);
            exported.description
        });
        let begin = Begin {
            version: VERSION,
            role,
            identity: self.identity.clone(),
            regions,
            memory,
        };
        Ok((begin, fds))
    }

    /// Takes the place of a supervisor that is gone: what it was to set back is this one's from now on.
    pub(super) fn own(&mut self) {
        self.name.own();
        if let Some(Held::Made(memory)) = &mut self.memory {
            memory.own();
        }
    }

    /// Leaves name, claim and files in place when this is dropped: what they stand for is still there.
    pub(super) fn disown(&mut self) {
        self.name.disown();
        if let Some(Held::Made(memory)) = &mut self.memory {
            memory.disown();
        }
    }

    /// Gives everything back and removes the files; the claim on the memory and the name go last.
    pub(super) fn release(self) {
        let name = &self.identity.spec.name;
        let files = [
            self.run_dir.socket(name),
            self.run_dir.note(name),
            self.run_dir.session(name),
        ];
        for path in files {
            let _ = std::fs::remove_file(path);
        }
        // Nothing is lost if the empty group stays.
        let _ = safety::remove_cgroup(name.as_str());
    }
}
