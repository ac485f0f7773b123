package graphopt;

import ai.onnxruntime.OnnxJavaType;
import ai.onnxruntime.OnnxTensor;
import ai.onnxruntime.OrtEnvironment;
import ai.onnxruntime.OrtException;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.util.Arrays;
import java.util.HashMap;
import java.util.List;
import java.util.Map;

/** An entry of host.json: a feed, a state, a hyperparameter or a report. */
final class Value {
    private static final Map<String, OnnxJavaType> TYPES = new HashMap<>();
    private static final Map<String, String> STORED = new HashMap<>();

    static {
        String[] names = {"float32", "float64", "int8", "int16", "int32", "int64", "bool", "uint8", "float16", "bfloat16"};
        String[] stored = {"F32", "F64", "I8", "I16", "I32", "I64", "BOOL", "U8", "F16", "BF16"};
        String[] types = {"FLOAT", "DOUBLE", "INT8", "INT16", "INT32", "INT64", "BOOL", "UINT8", "FLOAT16", "BFLOAT16"};
        for (int i = 0; i < names.length; i++) {
            TYPES.put(names[i], OnnxJavaType.valueOf(types[i]));
            STORED.put(names[i], stored[i]);
        }
    }

    final String name, next, kind;
    final OnnxJavaType type;
    final List<?> shape; // numbers, names of open sizes, and null for those without a name; null if it is not known
    final Object initial;
    double low = Double.NEGATIVE_INFINITY, high = Double.POSITIVE_INFINITY, ignored = Double.NaN; // labels

    Value(Object entry) throws GraphoptException {
        Map<?, ?> x = entry instanceof Map ? (Map<?, ?>) entry : new HashMap<>();
        name = text(x.get("name"), "a name");
        kind = text(x.get("type"), name + ": a type");
        type = TYPES.get(kind);
        next = x.get("next") instanceof String ? (String) x.get("next") : null;
        shape = x.get("shape") instanceof List ? (List<?>) x.get("shape") : null;
        initial = x.get("default");
        List<?> labels = x.get("labels") instanceof List ? (List<?>) x.get("labels") : null;
        if (labels != null && labels.size() == 2 && labels.get(0) instanceof Number && labels.get(1) instanceof Number) {
            low = ((Number) labels.get(0)).doubleValue();
            high = ((Number) labels.get(1)).doubleValue();
            if (x.get("ignored") instanceof Number) ignored = ((Number) x.get("ignored")).doubleValue();
        }
    }

    static String text(Object x, String what) throws GraphoptException {
        if (x instanceof String) return (String) x;
        throw new GraphoptException("host.json: expected " + what + ", found none: write it with export_hosts again");
    }

    String stored() {
        return STORED.get(kind);
    }

    private OnnxJavaType type() throws GraphoptException {
        if (type != null) return type;
        throw new GraphoptException(name + ": expected a type that ONNX Runtime has in Java, found " + kind);
    }

    /** A tensor of bytes, in the order of safetensors, which is that of the machine. */
    OnnxTensor tensor(OrtEnvironment environment, ByteBuffer bytes, long... dims) throws OrtException, GraphoptException {
        if (ByteOrder.nativeOrder() != ByteOrder.LITTLE_ENDIAN) throw new GraphoptException("this machine: expected one that is little-endian, found another: train on one");
        ByteBuffer own = ByteBuffer.allocateDirect(bytes.remaining()).order(ByteOrder.nativeOrder());
        own.put(bytes.duplicate()).rewind();
        return OnnxTensor.createTensor(environment, own, dims, type());
    }

    /** The sizes of a state. */
    long[] sizes() throws GraphoptException {
        long[] dims = new long[shape == null ? 0 : shape.size()];
        long product = type().size;
        for (int i = 0; i < dims.length; i++) {
            dims[i] = shape.get(i) instanceof Long ? (Long) shape.get(i) : -1;
            product = dims[i] < 0 || (dims[i] > 0 && product > Integer.MAX_VALUE / dims[i]) ? -1 : product * dims[i];
            if (product < 0) break;
        }
        if (shape == null || product < 0)
            throw new GraphoptException("host.json: state " + name + ": expected sizes below 2 GB, found " + shape);
        return dims;
    }

    /** A tensor of numbers that fit: an array of float, double, int or long, or an OnnxTensor. `sizes` are those of names. */
    OnnxTensor tensor(OrtEnvironment environment, Object fed, Map<String, Long> sizes) throws OrtException, GraphoptException {
        if (fed instanceof OnnxTensor) {
            OnnxTensor tensor = (OnnxTensor) fed;
            long[] dims = tensor.getInfo().getShape();
            if (tensor.getInfo().type != type() || (shape != null && dims.length != shape.size()))
                throw new GraphoptException(described(sizes) + ", found " + tensor.getInfo().type + " " + Arrays.toString(dims));
            for (int i = 0; shape != null && i < dims.length; i++) agree(i, dims, sizes);
            if (low > Double.NEGATIVE_INFINITY) check(Numbers.of(tensor));
            return tensor;
        }
        int count = length(fed);
        if (count <= 0 || shape == null) throw new GraphoptException(described(sizes) + ", found " + told(fed) + ": feed numbers, or an OnnxTensor");
        long[] dims = new long[shape.size()];
        int open = -1;
        long known = 1;
        for (int i = 0; i < dims.length; i++) {
            Object size = shape.get(i) instanceof Long ? shape.get(i) : sizes.get(shape.get(i));
            if (size != null) known *= dims[i] = (Long) size;
            else if (open >= 0) throw new GraphoptException(described(sizes) + ", of which several sizes are open, found " + told(fed) + ": feed an OnnxTensor");
            else open = i;
        }
        if (open >= 0) dims[open] = known > 0 ? count / known : 0;
        if ((open >= 0 ? known * dims[open] : known) != count || known <= 0)
            throw new GraphoptException(described(sizes) + ", found " + told(fed) + ": feed whole rows");
        if (open >= 0 && shape.get(open) instanceof String) sizes.put((String) shape.get(open), dims[open]);
        if ((long) count * type().size > Integer.MAX_VALUE) throw new GraphoptException(described(sizes) + " below 2 GB, found " + told(fed) + ": feed fewer rows");
        ByteBuffer bytes = ByteBuffer.allocateDirect(count * type.size).order(ByteOrder.nativeOrder());
        put(bytes, fed, count);
        bytes.rewind();
        check(bytes);
        return OnnxTensor.createTensor(environment, bytes, dims, type);
    }

    private void agree(int axis, long[] dims, Map<String, Long> sizes) throws GraphoptException {
        Object size = shape.get(axis), known = size instanceof String ? sizes.get(size) : size;
        if (known instanceof Long && (Long) known != dims[axis]) throw new GraphoptException(described(sizes) + ", found " + Arrays.toString(dims));
        if (size instanceof String) sizes.put((String) size, dims[axis]);
        if (dims[axis] == 0) throw new GraphoptException(described(sizes) + ", found " + Arrays.toString(dims) + ": feed a row or more");
    }

    private String described(Map<String, Long> sizes) {
        StringBuilder dims = new StringBuilder();
        if (shape != null) for (Object size : shape) dims.append(dims.length() > 0 ? ", " : "").append(sizes.containsKey(size) ? sizes.get(size) : size == null ? "?" : size);
        return name + ": expected " + kind + " [" + dims + "]";
    }

    private static int length(Object fed) {
        return fed instanceof float[] ? ((float[]) fed).length : fed instanceof long[] ? ((long[]) fed).length
            : fed instanceof int[] ? ((int[]) fed).length : fed instanceof double[] ? ((double[]) fed).length : -1;
    }

    private static String told(Object fed) {
        return fed == null ? "none" : length(fed) >= 0 ? length(fed) + " numbers" : fed.getClass().getSimpleName();
    }

    private void put(ByteBuffer bytes, Object fed, int count) throws GraphoptException {
        double least = type == OnnxJavaType.UINT8 || type == OnnxJavaType.BOOL ? 0 : -Math.pow(2, 8 * type.size - 1);
        double most = type == OnnxJavaType.BOOL ? 1 : type == OnnxJavaType.UINT8 ? 255 : -least - 1;
        if (type == OnnxJavaType.FLOAT && fed instanceof float[]) bytes.asFloatBuffer().put((float[]) fed);
        else if (type == OnnxJavaType.INT64 && fed instanceof long[]) bytes.asLongBuffer().put((long[]) fed);
        else for (int i = 0; i < count; i++) {
            double x = fed instanceof float[] ? ((float[]) fed)[i] : fed instanceof double[] ? ((double[]) fed)[i]
                : fed instanceof int[] ? ((int[]) fed)[i] : ((long[]) fed)[i];
            if (type == OnnxJavaType.FLOAT) bytes.putFloat((float) x);
            else if (type == OnnxJavaType.DOUBLE) bytes.putDouble(x);
            else if (type == OnnxJavaType.FLOAT16 || type == OnnxJavaType.BFLOAT16) bytes.putShort(Numbers.narrow(type, x));
            else if (x != Math.rint(x) || x < least || x > most) throw new GraphoptException(name + ": expected a whole number of " + kind + ", found " + x);
            else if (type == OnnxJavaType.INT64) bytes.putLong((long) x);
            else if (type == OnnxJavaType.INT32) bytes.putInt((int) x);
            else if (type == OnnxJavaType.INT16) bytes.putShort((short) x);
            else bytes.put((byte) (int) x);
        }
    }

    private void check(ByteBuffer bytes) throws GraphoptException {
        if (low == Double.NEGATIVE_INFINITY && high == Double.POSITIVE_INFINITY) return;
        for (int i = 0; i < bytes.remaining() / type.size; i++) {
            double x = Numbers.at(bytes, type, i);
            if (!(x >= low && x <= high) && x != ignored)
                throw new GraphoptException(name + ": expected labels " + (long) low + " to " + (long) high + ", found " + (x == (long) x ? "" + (long) x : "" + x));
        }
    }
}
