package graphopt;

import java.io.File;
import java.io.IOException;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.StandardCopyOption;
import java.util.List;
import java.util.Map;

/** A safetensors file: 8 bytes with the size of a header in JSON; the header; the numbers. */
final class Bytes {
    final byte[] content;
    private final Map<?, ?> entries;
    private final int begin;

    Bytes(byte[] content, String name) throws GraphoptException {
        this.content = content;
        long length = content.length < 8 ? -1 : ByteBuffer.wrap(content).order(ByteOrder.LITTLE_ENDIAN).getLong();
        if (length < 0 || length > content.length - 8)
            throw new GraphoptException(name + ": expected a safetensors file, found one that is cut or another");
        Object header = Json.read(new String(content, 8, (int) length, StandardCharsets.UTF_8));
        if (!(header instanceof Map)) throw new GraphoptException(name + ": expected a safetensors file, found another");
        entries = (Map<?, ?>) header;
        begin = 8 + (int) length;
    }

    /** The type of a tensor, as safetensors names it; null if the file has none of the name. */
    String type(String name) {
        Object entry = entries.get(name), type = entry instanceof Map ? ((Map<?, ?>) entry).get("dtype") : null;
        return type instanceof String ? (String) type : null;
    }

    /** The numbers of a tensor, which are part of the content. */
    ByteBuffer numbers(String name) throws GraphoptException {
        Object entry = entries.get(name), at = entry instanceof Map ? ((Map<?, ?>) entry).get("data_offsets") : null;
        List<?> ends = at instanceof List ? (List<?>) at : null;
        if (ends != null && ends.size() == 2 && ends.get(0) instanceof Long && ends.get(1) instanceof Long) {
            long first = (Long) ends.get(0), last = (Long) ends.get(1);
            if (0 <= first && first <= last && last <= content.length - begin)
                return ((ByteBuffer) ByteBuffer.wrap(content).position(begin + (int) first).limit(begin + (int) last)).slice().order(ByteOrder.LITTLE_ENDIAN);
        }
        throw new GraphoptException("expected the numbers of '" + name + "', found none");
    }

    static byte[] read(File file) throws IOException {
        return Files.readAllBytes(file.toPath());
    }

    /** Writes a file, all of it or nothing. */
    static void write(File file, byte[] content) throws IOException {
        File part = new File(file.getPath() + ".part");
        try {
            Files.write(part.toPath(), content);
            Files.move(part.toPath(), file.toPath(), StandardCopyOption.REPLACE_EXISTING);
        } finally {
            Files.deleteIfExists(part.toPath());
        }
    }
}
