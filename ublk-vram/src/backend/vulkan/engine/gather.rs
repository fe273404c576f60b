//! One queue thread's way to the shader that moves many pieces in one dispatch (gather.comp).
//!
//! Every slot has a command buffer that was recorded once and a table that it reads: how many pieces,
//! and what they are. To start a batch is to fill the table and submit.

use std::io::Cursor;
use std::sync::Arc;
use std::time::Instant;

use ash::vk;

use super::EngineQueue;
use super::lane::{Batch, Ended, Part, Slots};
use crate::backend::Direction;
use crate::backend::Mapping;
use crate::backend::vulkan::device::Device;
use crate::backend::vulkan::loader::failed;
use crate::backend::vulkan::memory::{Allocation, Source};
use crate::error::{Error, ErrorKind, Result};

/// Pieces in one dispatch.
pub(in crate::backend::vulkan) const MOST_PIECES: usize = 256;
/// Bytes of a piece at most: work groups of a like size end at a like time.
const PIECE_BYTES: u32 = 16 << 10;
/// The shader's unit.
const QUAD: u64 = 16;
/// VkDispatchIndirectCommand, on a line of its own.
const COUNT_BYTES: u64 = 64;
const TABLE_BYTES: u64 = COUNT_BYTES + (MOST_PIECES * size_of::<Piece>()) as u64;
/// A page that probes copy to, behind the tables.
const SCRATCH_BYTES: u64 = 4096;

/// `Piece` in gather.comp.
#[repr(C)]
#[derive(Clone, Copy)]
struct Piece {
    from: u64,
    to: u64,
    quads: u32,
    unused: [u32; 3],
}

static SHADER: &[u8] = include_bytes!("gather.spv");

/// The way to the shader.
pub(in crate::backend::vulkan) struct GatherLane {
    slots: Slots,
    /// Dropped before the tables that its commands read.
    pipeline: Arc<Pipeline>,
    tables: Arc<Allocation>,
    mapping: Mapping,
    count: usize,
}

/// The shader, compiled for the GPU; all lanes share it.
pub(in crate::backend::vulkan) struct Pipeline {
    device: Arc<Device>,
    layout: vk::PipelineLayout,
    pipeline: vk::Pipeline,
}

impl Drop for Pipeline {
    fn drop(&mut self) {
        if self.device.is_abandoned() {
            return;
        }
        // SAFETY: made from this device, and nothing that uses them is in flight (the slots are
        // dropped first); null handles are ignored.
        unsafe {
            self.device.api.destroy_pipeline(self.pipeline, None);
            self.device.api.destroy_pipeline_layout(self.layout, None);
        }
    }
}

impl Pipeline {
    pub(in crate::backend::vulkan) fn new(device: &Arc<Device>) -> Result<Pipeline> {
        let api = &device.api;
        let fail = |result| {
            device.note(result);
            failed(
                format!("the shader does not run on {}", device.gpu.label()),
                result,
            )
        };
        let mut made = Pipeline {
            device: Arc::clone(device),
            layout: vk::PipelineLayout::null(),
            pipeline: vk::Pipeline::null(),
        };
        let ranges = [vk::PushConstantRange::default()
            .stage_flags(vk::ShaderStageFlags::COMPUTE)
            .size(size_of::<u64>() as u32)];
        let info = vk::PipelineLayoutCreateInfo::default().push_constant_ranges(&ranges);
        // SAFETY: the device is alive; every `info` outlives its call.
        made.layout = unsafe { api.create_pipeline_layout(&info, None) }.map_err(fail)?;
        let code = ash::util::read_spv(&mut Cursor::new(SHADER))
            .map_err(|error| Error::os("the shader cannot be read", error))?;
        let info = vk::ShaderModuleCreateInfo::default().code(&code);
        // SAFETY: as above; the code is what the compiler made of gather.comp.
        let module = unsafe { api.create_shader_module(&info, None) }.map_err(fail)?;
        let stage = vk::PipelineShaderStageCreateInfo::default()
            .stage(vk::ShaderStageFlags::COMPUTE)
            .module(module)
            .name(c"main");
        let info = [vk::ComputePipelineCreateInfo::default()
            .stage(stage)
            .layout(made.layout)];
        // SAFETY: as above; the module is needed only during the call.
        let outcome = unsafe {
            let outcome = api.create_compute_pipelines(vk::PipelineCache::null(), &info, None);
            api.destroy_shader_module(module, None);
            outcome
        };
        let pipelines = outcome.map_err(|(_, result)| fail(result))?;
        made.pipeline = pipelines.first().copied().unwrap_or_default();
        Ok(made)
    }
}

impl GatherLane {
    pub(in crate::backend::vulkan) fn new(
        device: &Arc<Device>,
        queue: &Arc<EngineQueue>,
        pipeline: &Arc<Pipeline>,
        count: usize,
    ) -> Result<GatherLane> {
        let size = TABLE_BYTES * count as u64 + SCRATCH_BYTES;
        // In the GPU's memory the shader finds its table at once, and the CPU's stores are posted.
        let kinds = [device.types.mapped, device.types.system];
        let table = kinds.into_iter().flatten().find_map(|kind| {
            let made = Allocation::new(device, size, kind.index, Source::Own).ok()?;
            let made = Arc::new(made);
            let mapping = made.map(size).ok()?;
            Some((made, mapping))
        });
        let Some((tables, mapping)) = table else {
            return Err(Error::new(
                ErrorKind::NoSpace,
                format!(
                    "{} has no memory for the shader's tables",
                    device.gpu.label()
                ),
            ));
        };
        let lane = GatherLane {
            slots: Slots::new(device, queue, count, MOST_PIECES)?,
            pipeline: Arc::clone(pipeline),
            tables,
            mapping,
            count,
        };
        lane.record(device).map_err(|result| {
            failed(
                format!("no commands for {} can be recorded", device.gpu.label()),
                result,
            )
        })?;
        Ok(lane)
    }

    fn table(index: usize) -> u64 {
        TABLE_BYTES * index as u64
    }

    fn record(&self, device: &Device) -> std::result::Result<(), vk::Result> {
        let api = &device.api;
        for (command, index) in self.slots.commands().zip(0..) {
            let begin = vk::CommandBufferBeginInfo::default();
            let pieces = self.tables.address + GatherLane::table(index) + COUNT_BYTES;
            // The shader's writes are seen by the CPU, and by whatever engine comes next.
            let barrier = vk::MemoryBarrier::default()
                .src_access_mask(vk::AccessFlags::SHADER_WRITE)
                .dst_access_mask(vk::AccessFlags::MEMORY_READ | vk::AccessFlags::HOST_READ);
            // SAFETY: the command buffer is new, and everything it names lives as long as the lane.
            unsafe {
                api.begin_command_buffer(command, &begin)?;
                api.cmd_bind_pipeline(
                    command,
                    vk::PipelineBindPoint::COMPUTE,
                    self.pipeline.pipeline,
                );
                api.cmd_push_constants(
                    command,
                    self.pipeline.layout,
                    vk::ShaderStageFlags::COMPUTE,
                    0,
                    &pieces.to_ne_bytes(),
                );
                api.cmd_dispatch_indirect(command, self.tables.buffer, GatherLane::table(index));
                api.cmd_pipeline_barrier(
                    command,
                    vk::PipelineStageFlags::COMPUTE_SHADER,
                    vk::PipelineStageFlags::ALL_COMMANDS | vk::PipelineStageFlags::HOST,
                    vk::DependencyFlags::empty(),
                    &[barrier],
                    &[],
                    &[],
                );
                api.end_command_buffer(command)?;
            }
        }
        Ok(())
    }

    /// Pieces that a copy is made of; `None` if the shader cannot carry it.
    pub(in crate::backend::vulkan) fn pieces(part_len: u32, offset: u64) -> Option<usize> {
        let aligned = u64::from(part_len).is_multiple_of(QUAD) && offset.is_multiple_of(QUAD);
        let pieces = part_len.div_ceil(PIECE_BYTES) as usize;
        (aligned && pieces <= MOST_PIECES).then_some(pieces)
    }

    /// Starts a batch whose pieces the caller has counted. False if every slot is taken.
    pub(in crate::backend::vulkan) fn start(&mut self, parts: &[Part], batch: Batch) -> bool {
        let Some((index, _)) = self.slots.take() else {
            return false;
        };
        let pieces = parts.iter().flat_map(|part| {
            let chunk = part.chunk_address + part.chunk_offset;
            let memory = part.host_address + part.host_offset;
            let (from, to) = match part.direction {
                Direction::Read => (chunk, memory),
                _ => (memory, chunk),
            };
            (0..part.len)
                .step_by(PIECE_BYTES as usize)
                .map(move |at| Piece {
                    from: from + u64::from(at),
                    to: to + u64::from(at),
                    quads: (part.len - at).min(PIECE_BYTES) / QUAD as u32,
                    unused: [0; 3],
                })
        });
        self.fill(index, pieces);
        self.slots.send(index, parts, batch);
        true
    }

    /// Sends one page at `address` through the shader, to nowhere.
    pub(in crate::backend::vulkan) fn probe(&mut self, address: u64, batch: Batch) -> bool {
        let Some((index, _)) = self.slots.take() else {
            return false;
        };
        let piece = Piece {
            from: address,
            to: self.tables.address + GatherLane::table(self.count),
            quads: (SCRATCH_BYTES / QUAD) as u32,
            unused: [0; 3],
        };
        self.fill(index, std::iter::once(piece));
        self.slots.send(index, &[], batch);
        true
    }

    /// Writes the table of a free slot.
    fn fill(&self, index: usize, pieces: impl Iterator<Item = Piece>) {
        let at = GatherLane::table(index);
        let Some(table) = self.mapping.at(at, TABLE_BYTES as usize) else {
            return;
        };
        // SAFETY: `table` is mapped for a whole table; the slot is free, so the shader does not read it;
        // `take` keeps the pieces inside. Stores are volatile so that they are neither merged nor left
        // out: this may be write-combined memory, which is never read here.
        unsafe {
            let list = table.add(COUNT_BYTES as usize).cast::<Piece>();
            let mut count = 0u32;
            for piece in pieces.take(MOST_PIECES) {
                list.add(count as usize).write_volatile(piece);
                count += 1;
            }
            table.cast::<[u32; 3]>().write_volatile([count, 1, 1]);
        }
        // Out of this CPU's write-combining buffers, before the submission.
        std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
    }

    pub(in crate::backend::vulkan) fn flying(&self) -> usize {
        self.slots.flying()
    }

    pub(in crate::backend::vulkan) fn backlog(&self) -> f64 {
        self.slots.backlog()
    }

    pub(in crate::backend::vulkan) fn next_end(&self) -> Option<(vk::Semaphore, u64)> {
        self.slots.next_end()
    }

    pub(in crate::backend::vulkan) fn unfinished_at(&mut self, at: Instant) {
        self.slots.unfinished_at(at);
    }

    pub(in crate::backend::vulkan) fn collect(&mut self, each: impl FnMut(&Ended, &[Part])) {
        self.slots.collect(each);
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    /// The binary form is what the compiler makes of the source beside it.
    #[test]
    fn the_shader_is_made_of_its_source() {
        let folder =
            std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("src/backend/vulkan/engine");
        let scratch = tempfile::tempdir().unwrap();
        let made = scratch.path().join("gather.spv");
        let output = Command::new("glslangValidator")
            .args(["-V", "--target-env", "vulkan1.2", "-o"])
            .arg(&made)
            .arg(folder.join("gather.comp"))
            .output()
            .expect("this test needs glslangValidator (glslang-tools)");
        assert!(output.status.success(), "{output:?}");
        // Word 2 names the compiler and its version (SPIR-V, 2.3): the one thing that may differ.
        let without = |code: &[u8]| [&code[..8], &code[12..]].concat();
        assert_eq!(without(&std::fs::read(made).unwrap()), without(SHADER));
    }

    #[test]
    fn pieces_are_counted() {
        assert_eq!(GatherLane::pieces(4096, 0), Some(1));
        assert_eq!(GatherLane::pieces(16 << 10, 16), Some(1));
        assert_eq!(GatherLane::pieces((16 << 10) + 16, 0), Some(2));
        assert_eq!(GatherLane::pieces(4 << 20, 0), Some(MOST_PIECES));
        assert_eq!(GatherLane::pieces((4 << 20) + 16, 0), None);
        assert_eq!(GatherLane::pieces(8, 0), None);
        assert_eq!(GatherLane::pieces(16, 8), None);
    }
}
