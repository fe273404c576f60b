// Moves many pieces at once: one work group copies one piece.
//
// The pieces are listed in memory that the host writes; the number of work groups comes from the same
// memory (an indirect dispatch), so that a command buffer is recorded once and only submitted again.
// Addresses are device addresses (VK_KHR_buffer_device_address): a piece may lie in any chunk.
//
// gather.spv is made of this file by
//     glslangValidator -V --target-env vulkan1.2 -o gather.spv gather.comp
// and a test makes it again and compares.
#version 460
#extension GL_EXT_buffer_reference : require
#extension GL_EXT_buffer_reference_uvec2 : require

layout(local_size_x = 256) in;

layout(buffer_reference, std430, buffer_reference_align = 16) buffer Quads {
    uvec4 at[];
};

// `Piece` in gather.rs.
struct Piece {
    uvec2 from;
    uvec2 to;
    // Units of 16 bytes.
    uint quads;
    uint unused0;
    uint unused1;
    uint unused2;
};

layout(buffer_reference, std430, buffer_reference_align = 16) readonly buffer Pieces {
    Piece at[];
};

layout(push_constant) uniform Push {
    uvec2 pieces;
} push;

void main() {
    Piece piece = Pieces(push.pieces).at[gl_WorkGroupID.x];
    Quads from = Quads(piece.from);
    Quads to = Quads(piece.to);
    for (uint i = gl_LocalInvocationID.x; i < piece.quads; i += gl_WorkGroupSize.x) {
        to.at[i] = from.at[i];
    }
}
